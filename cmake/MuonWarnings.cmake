# muon_warnings: the warning and sanitizer flags of our own sources; never exported.

add_library(muon_warnings INTERFACE)
target_compile_options(
  muon_warnings
  INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wconversion>"
    "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${MUON_WERROR}>>:-Werror>"
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wshadow>"
    "$<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${MUON_WERROR}>>:-Werror=all-warnings>")

# g++ 12 and 13 report string concatenation and torch's IValue wrongly (GCC bugs 105329 and 106247).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
  target_compile_options(
    muon_warnings INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict;-Wno-array-bounds>")
endif()

if(MUON_SANITIZE)
  # torch is not built with sanitizers: no vptr checks across its classes. ifunc resolvers run before the sanitizers'
  # runtime, so that functions must not be cloned for instruction sets.
  set(sanitizers "-fsanitize=${MUON_SANITIZE}" "-fno-sanitize=vptr" "-fno-sanitize-recover=all")
  target_compile_options(muon_warnings INTERFACE ${sanitizers} -fno-omit-frame-pointer)
  target_compile_definitions(muon_warnings INTERFACE MUON_NO_TARGET_CLONES)
  target_link_options(muon_warnings INTERFACE ${sanitizers})
endif()
