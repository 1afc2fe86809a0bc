# A precompiled torch header for the tests, which include all of torch/torch.h. Without optimisation: what GCC spends its
# time on after reading such a header is code generation, and tests do their work inside libtorch. The library itself
# includes single ATen headers instead, which is faster than any precompiled one.

add_compile_options(-O0)
set(CMAKE_CXX_COMPILER_LAUNCHER "")  # hashing the precompiled header costs more than ccache saves

if(NOT EXISTS ${PROJECT_BINARY_DIR}/fsdp_pch.cc)
  file(TOUCH ${PROJECT_BINARY_DIR}/fsdp_pch.cc)
endif()
add_library(fsdp_pch OBJECT ${PROJECT_BINARY_DIR}/fsdp_pch.cc)
target_link_libraries(fsdp_pch PRIVATE fsdp::torch)
target_precompile_headers(fsdp_pch PRIVATE <torch/torch.h>)

# Gives `target` the precompiled header. The target must be compiled with the tests' own flags.
function(fsdp_use_pch target)
  target_precompile_headers(${target} REUSE_FROM fsdp_pch)
endfunction()
