# The target fsdp::nccl: what the engine nccl is compiled with and linked to, of a CUDA build of torch. Its wheel comes
# with NCCL's and most of CUDA's headers beside it; the compiler's own are the CUDA toolkit's.

if(NOT EXISTS ${FSDP_TORCH_ROOT}/lib/libtorch_cuda.so)
  message(FATAL_ERROR "fsdp: FSDP_NCCL needs a CUDA build of torch; the one in ${FSDP_TORCH_ROOT} has no libtorch_cuda.so.")
endif()
find_package(CUDAToolkit REQUIRED)
file(GLOB fsdp_cuda_headers ${FSDP_TORCH_ROOT}/../nvidia/cu*/include)
find_path(fsdp_nccl_headers nccl.h HINTS ${FSDP_TORCH_ROOT}/../nvidia/nccl/include REQUIRED)
add_library(fsdp::nccl INTERFACE IMPORTED)
target_include_directories(fsdp::nccl SYSTEM INTERFACE ${fsdp_nccl_headers} ${fsdp_cuda_headers} ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(fsdp::nccl INTERFACE ${FSDP_TORCH_ROOT}/lib/libtorch_cuda.so ${FSDP_TORCH_ROOT}/lib/libc10_cuda.so)
