# Defines Muon::torch: LibTorch as it lies in a torch wheel or a LibTorch archive.
#
# TorchConfig.cmake is not used: with a CUDA build of torch it fails where no CUDA toolkit is installed, and it rewrites
# the CUDA flags and architectures where one is. Muon::torch works beside a find_package(Torch) of the same torch.
#
# Input:   MUON_TORCH_DIR      the folder with torch's include/ and lib/; searched for where it is not given
# Output:  MUON_TORCH_DIR, MUON_TORCH_VERSION (major.minor.patch)

include_guard(DIRECTORY)

set(MUON_TORCH_VERSION_MIN 2.11)
set(MUON_TORCH_VERSION_END 2.16)

# The torch that the project's Python sees; find_spec locates it without the seconds that importing it takes.
function(_muon_torch_of_python output)
  find_package(Python COMPONENTS Interpreter QUIET)
  if(Python_Interpreter_FOUND)
    execute_process(
      COMMAND
        "${Python_EXECUTABLE}" -c
        "from importlib.util import find_spec; s = find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE found
      OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  set(${output} "${found}" PARENT_SCOPE)
endfunction()

# `candidates` are tried in order, then a torch found by find_package(Torch), then Python's.
function(_muon_find_torch_dir)
  if(MUON_TORCH_DIR)
    set(candidates "${MUON_TORCH_DIR}")
  else()
    _muon_torch_of_python(python_torch)
    set(candidates ${TORCH_INSTALL_PREFIX} ${_muon_torch_candidates} ${python_torch})
  endif()
  foreach(candidate IN LISTS candidates)
    if(EXISTS "${candidate}/include/ATen/core/Tensor.h" AND EXISTS "${candidate}/lib/libtorch_cpu.so")
      get_filename_component(candidate "${candidate}" ABSOLUTE)
      set(MUON_TORCH_DIR "${candidate}" CACHE PATH "Folder with torch's include/ and lib/")
      set(MUON_TORCH_DIR "${candidate}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  if(NOT candidates)
    set(candidates "${Python_EXECUTABLE}'s packages")
  endif()
  list(JOIN candidates ", " tried)
  if(SKBUILD)
    set(way_out "Install it with `pip install torch`, then give pip the option --no-build-isolation")
  else()
    set(way_out "Install it with `pip install torch` or point Python_EXECUTABLE to a Python that has it")
  endif()
  message(FATAL_ERROR "libmuon: found no torch (looked in: ${tried}). ${way_out}, or give its folder (with include/ and "
                      "lib/) as -DMUON_TORCH_DIR=...")
endfunction()

function(_muon_read_torch_version)
  foreach(header include/torch/headeronly/version.h include/torch/csrc/api/include/torch/version.h)
    if(EXISTS "${MUON_TORCH_DIR}/${header}")
      file(STRINGS "${MUON_TORCH_DIR}/${header}" lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
      string(REGEX MATCHALL "[0-9]+" numbers "${lines}")
      list(LENGTH numbers count)
      if(count EQUAL 3)
        list(JOIN numbers "." version)
        set(MUON_TORCH_VERSION "${version}" PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
  message(FATAL_ERROR "libmuon: the torch in ${MUON_TORCH_DIR} has no readable version.h")
endfunction()

function(_muon_define_torch)
  set(lib "${MUON_TORCH_DIR}/lib")
  add_library(Muon::torch INTERFACE IMPORTED)
  # libtorch.so has no code: loading it loads libtorch_cuda.so, without which a program sees no GPU. Linkers that drop
  # libraries without used symbols must not drop it.
  set(libraries "-Wl,--push-state,--no-as-needed,${lib}/libtorch.so,--pop-state" "${lib}/libtorch_cpu.so"
                "${lib}/libc10.so")
  set(definitions USE_DISTRIBUTED USE_C10D_GLOO)
  if(EXISTS "${lib}/libtorch_cuda.so")
    list(APPEND definitions USE_C10D_NCCL)
  endif()
  target_include_directories(
    Muon::torch SYSTEM INTERFACE "${MUON_TORCH_DIR}/include"
                                 "${MUON_TORCH_DIR}/include/torch/csrc/api/include")
  target_compile_definitions(Muon::torch INTERFACE ${definitions})
  target_compile_features(Muon::torch INTERFACE cxx_std_20)
  target_link_libraries(Muon::torch INTERFACE ${libraries})
  # A CUDA toolkit's older NCCL may be found before the one that torch itself loads at run time.
  target_link_options(Muon::torch INTERFACE "LINKER:--allow-shlib-undefined")
endfunction()

_muon_find_torch_dir()
_muon_read_torch_version()
if(MUON_TORCH_VERSION VERSION_LESS MUON_TORCH_VERSION_MIN
   OR NOT MUON_TORCH_VERSION VERSION_LESS MUON_TORCH_VERSION_END)
  message(FATAL_ERROR "libmuon: needs torch ${MUON_TORCH_VERSION_MIN} or newer and older than ${MUON_TORCH_VERSION_END}, "
                      "got ${MUON_TORCH_VERSION} in ${MUON_TORCH_DIR}")
endif()
if(NOT TARGET Muon::torch)
  _muon_define_torch()
endif()
