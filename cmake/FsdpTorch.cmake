# The target fsdp::torch: libtorch's headers and its CPU libraries. Used by the build and by find_package(fsdp).
#
# Not find_package(Torch): on a CUDA wheel that wants a CUDA toolkit, which neither this library nor its users need.
# libtorch is taken from FSDP_TORCH_ROOT, else from the `torch` package of the Python interpreter that CMake finds
# (-DPython3_EXECUTABLE chooses one).

set(FSDP_TORCH_MINIMUM 2.13)

if(NOT FSDP_TORCH_ROOT)
  find_package(Python3 COMPONENTS Interpreter REQUIRED)
  # With -I too: an isolated build by pip hides from its interpreter, through the environment, the torch that is
  # installed, which is the one to build for.
  foreach(flags "" -I)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} ${flags} -c
        "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE fsdp_torch_root OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    if(fsdp_torch_root)
      break()
    endif()
  endforeach()
  if(NOT fsdp_torch_root)
    message(FATAL_ERROR "fsdp: ${Python3_EXECUTABLE} has no torch package. Install torch ${FSDP_TORCH_MINIMUM} or "
      "later for it, or pass -DPython3_EXECUTABLE=... or -DFSDP_TORCH_ROOT=<folder that holds libtorch's lib and include>.")
  endif()
  set(FSDP_TORCH_ROOT ${fsdp_torch_root} CACHE PATH "Folder that holds libtorch's lib and include")
endif()

find_file(fsdp_torch_version_header NAMES torch/headeronly/version.h torch/version.h
  PATHS ${FSDP_TORCH_ROOT}/include ${FSDP_TORCH_ROOT}/include/torch/csrc/api/include NO_CACHE NO_DEFAULT_PATH)
if(NOT fsdp_torch_version_header)
  message(FATAL_ERROR "fsdp: no libtorch in ${FSDP_TORCH_ROOT} (FSDP_TORCH_ROOT): its version header is missing.")
endif()
file(STRINGS ${fsdp_torch_version_header} fsdp_torch_defines REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
string(REGEX REPLACE "[^0-9]*([0-9]+)[^0-9]+([0-9]+)[^0-9]+([0-9]+)" "\\1.\\2.\\3" FSDP_TORCH_VERSION "${fsdp_torch_defines}")
if(FSDP_TORCH_VERSION VERSION_LESS FSDP_TORCH_MINIMUM)
  message(FATAL_ERROR "fsdp: torch ${FSDP_TORCH_VERSION} in ${FSDP_TORCH_ROOT} is too old; "
    "libfsdp needs ${FSDP_TORCH_MINIMUM} or later. Pass -DPython3_EXECUTABLE=... or -DFSDP_TORCH_ROOT=... to use another one.")
endif()
if(NOT TARGET fsdp::torch)
  message(STATUS "fsdp: torch ${FSDP_TORCH_VERSION} in ${FSDP_TORCH_ROOT}")
  add_library(fsdp::torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(fsdp::torch SYSTEM INTERFACE
    ${FSDP_TORCH_ROOT}/include ${FSDP_TORCH_ROOT}/include/torch/csrc/api/include)
  target_compile_definitions(fsdp::torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
  target_link_libraries(fsdp::torch INTERFACE ${FSDP_TORCH_ROOT}/lib/libtorch_cpu.so ${FSDP_TORCH_ROOT}/lib/libc10.so)
endif()
