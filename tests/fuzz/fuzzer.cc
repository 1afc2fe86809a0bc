// libFuzzer's entry. FSDP_FUZZ_TARGET: header or index.
#include "targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fsdp::fuzz::FSDP_FUZZ_TARGET(data, size);
  return 0;
}
