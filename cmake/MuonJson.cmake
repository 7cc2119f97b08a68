# muon_json: nlohmann-json for tests, examples and benchmarks; the library itself does not use it.

if(NOT TARGET muon_json)
  find_package(Python COMPONENTS Interpreter QUIET)
  if(Python_Interpreter_FOUND)
    execute_process(
      COMMAND
        "${Python_EXECUTABLE}" -c
        "from importlib.util import find_spec; s = find_spec('nlohmann_json'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE package
      OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  find_path(MUON_JSON_INCLUDE_DIR nlohmann/json.hpp HINTS "${package}/include")
  if(NOT MUON_JSON_INCLUDE_DIR)
    message(FATAL_ERROR "libmuon: the tests, examples and benchmarks need nlohmann-json: `pip install nlohmann-json` or "
                        "`apt-get install nlohmann-json3-dev`, or switch them off (MUON_BUILD_TESTS, ...)")
  endif()
  add_library(muon_json INTERFACE IMPORTED GLOBAL)
  target_include_directories(muon_json SYSTEM INTERFACE "${MUON_JSON_INCLUDE_DIR}")
endif()
