# Install tree: lib/, include/, share/cmake/Muon, and in a wheel the extension module at the root of the package.

include(CMakePackageConfigHelpers)

set(package_files "share/cmake/Muon")
set(generated "${CMAKE_CURRENT_BINARY_DIR}/cmake")

if(SKBUILD)
  # Site-packages has torch beside libmuon.
  set_target_properties(muon PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/../../torch/lib")
  install(TARGETS muon_python LIBRARY DESTINATION .)
else()
  set_target_properties(muon PROPERTIES INSTALL_RPATH "$ORIGIN;${MUON_TORCH_DIR}/lib")
endif()

install(TARGETS muon EXPORT MuonTargets LIBRARY DESTINATION lib)
install(DIRECTORY include/muon DESTINATION include)
install(EXPORT MuonTargets NAMESPACE Muon:: DESTINATION ${package_files})

configure_package_config_file(cmake/MuonConfig.cmake.in "${generated}/MuonConfig.cmake"
                              INSTALL_DESTINATION ${package_files})
write_basic_package_version_file("${generated}/MuonConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
set(config_files "${generated}/MuonConfig.cmake" "${generated}/MuonConfigVersion.cmake"
                 "${CMAKE_CURRENT_LIST_DIR}/MuonTorch.cmake")
install(FILES ${config_files} DESTINATION ${package_files})

# The package of the build tree, so that `libmuon.cmake_prefix_path` holds in development too.
if(MUON_BUILD_PYTHON AND NOT SKBUILD)
  set(build_package "${CMAKE_BINARY_DIR}/python/libmuon/${package_files}")
  export(EXPORT MuonTargets NAMESPACE Muon:: FILE "${build_package}/MuonTargets.cmake")
  file(COPY ${config_files} DESTINATION "${build_package}")
endif()
