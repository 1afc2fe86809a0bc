#include "comm/copy.h"

#include <cstring>

#include <ATen/core/LegacyTypeDispatch.h>

namespace fsdp::comm {

void copy_elements(const at::Tensor& dst, int64_t dst_begin, const at::Tensor& src, int64_t src_begin, int64_t length) {
  if (length == 0) {
    return;
  }
  if (dst.is_cpu() && src.is_cpu()) {
    const auto width = dst.element_size();
    auto* to = static_cast<char*>(dst.mutable_data_ptr()) + dst_begin * width;
    const auto* from = static_cast<const char*>(src.const_data_ptr()) + src_begin * width;
    if (to != from) {
      std::memcpy(to, from, length * width);
    }
    return;
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  dst.view(-1).narrow(0, dst_begin, length).copy_(src.view(-1).narrow(0, src_begin, length), /*non_blocking=*/true);
}

}  // namespace fsdp::comm
