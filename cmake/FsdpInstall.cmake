# `cmake --install`: the library, the public headers and what find_package(fsdp) reads.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Public headers are named one by one: nothing becomes public by lying in a folder.
set(FSDP_PUBLIC_HEADERS fsdp export error distributed device_mesh dtensor clip_grad custom_comm optim fully_shard
  fully_sharded_data_parallel grad_scaler checkpoint tensor_extension)
list(TRANSFORM FSDP_PUBLIC_HEADERS REPLACE "(.+)" "${PROJECT_SOURCE_DIR}/include/fsdp/\\1.h")

set_target_properties(fsdp PROPERTIES INSTALL_RPATH ${FSDP_TORCH_ROOT}/lib)
install(TARGETS fsdp EXPORT fsdp-targets INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${FSDP_PUBLIC_HEADERS} ${PROJECT_BINARY_DIR}/include/fsdp/version.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/fsdp)

set(fsdp_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fsdp)
install(EXPORT fsdp-targets NAMESPACE fsdp:: DESTINATION ${fsdp_cmake_dir})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/fsdp-config.cmake.in ${PROJECT_BINARY_DIR}/fsdp-config.cmake
  INSTALL_DESTINATION ${fsdp_cmake_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fsdp-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fsdp-config.cmake ${PROJECT_BINARY_DIR}/fsdp-config-version.cmake
  ${CMAKE_CURRENT_LIST_DIR}/FsdpTorch.cmake DESTINATION ${fsdp_cmake_dir})
