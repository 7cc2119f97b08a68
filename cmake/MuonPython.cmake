# muon_python: the extension module libmuon/_C.abi3.so, whose loading registers the ops.
#
# In a build tree, python/libmuon holds the module and links to the Python sources: with `<build>/python` on the path,
# `import libmuon` sees the build and every edit.

set(package "${CMAKE_BINARY_DIR}/python/libmuon")

add_library(muon_python MODULE ops/module.cpp)
target_link_libraries(muon_python PRIVATE muon muon_warnings)
set_target_properties(
  muon_python
  PROPERTIES OUTPUT_NAME _C
             PREFIX ""
             SUFFIX .abi3.so
             LIBRARY_OUTPUT_DIRECTORY "${package}"
             INSTALL_RPATH "$ORIGIN/lib")
# Only the dynamic loader needs libmuon.so here; the module uses none of its symbols.
target_link_options(muon_python PRIVATE "LINKER:--no-as-needed")

if(NOT SKBUILD)
  file(GLOB entries CONFIGURE_DEPENDS python/libmuon/*)
  list(FILTER entries EXCLUDE REGEX "/__pycache__$")
  file(MAKE_DIRECTORY "${package}")
  file(GLOB links "${package}/*")
  foreach(link IN LISTS links)
    if(IS_SYMLINK "${link}")
      file(REMOVE "${link}")
    endif()
  endforeach()
  foreach(entry IN LISTS entries)
    get_filename_component(name "${entry}" NAME)
    file(CREATE_LINK "${entry}" "${package}/${name}" SYMBOLIC)
  endforeach()
endif()
