# One precompiled torch header for everything: reading it takes a second, compiling it takes twenty.

file(WRITE ${PROJECT_BINARY_DIR}/fsdp_pch.cc "")
add_library(fsdp_pch OBJECT ${PROJECT_BINARY_DIR}/fsdp_pch.cc)
target_link_libraries(fsdp_pch PRIVATE fsdp::torch)
target_precompile_headers(fsdp_pch PRIVATE <torch/torch.h>)

# Gives `target` the precompiled header. The target must be compiled with the project's own flags.
function(fsdp_use_pch target)
  target_precompile_headers(${target} REUSE_FROM fsdp_pch)
endfunction()
