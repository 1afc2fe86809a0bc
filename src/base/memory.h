#pragma once
#include <cstring>

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include "base/huge_pages.h"

namespace fsdp::base {

/// Copies bytes within a device, on the current stream. A plain memcpy on the CPU.
inline void copy_bytes(void* to, const void* from, int64_t nbytes, c10::Device device) {
  if (nbytes == 0) return;
  if (device.is_cpu()) {
    std::memcpy(to, from, static_cast<size_t>(nbytes));
    return;
  }
  const auto bytes = [&](void* at) {
    return at::for_blob(at, {nbytes})
        .options(at::TensorOptions(at::kByte).device(device))
        .target_device(device)
        .make_tensor();
  };
  bytes(to).copy_(bytes(const_cast<void*>(from)), /*non_blocking=*/true);
}

namespace detail {

template <int64_t kBytes>
void copy_small_blocks(char* to, int64_t to_stride, const char* from, int64_t from_stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, kBytes);
}

}  // namespace detail

/// `count` blocks of `nbytes`, the i-th from `from` + i * from_stride to `to` + i * to_stride (strides in bytes). On
/// the CPU, blocks of up to 64 bytes cost a load and a store each, not a call.
inline void copy_blocks(void* to, int64_t to_stride, const void* from, int64_t from_stride, int64_t nbytes,
                        int64_t count, c10::Device device) {
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
  if (count > 1 && device.is_cpu()) {
    switch (nbytes) {
      case 2:
        return detail::copy_small_blocks<2>(out, to_stride, in, from_stride, count);
      case 4:
        return detail::copy_small_blocks<4>(out, to_stride, in, from_stride, count);
      case 8:
        return detail::copy_small_blocks<8>(out, to_stride, in, from_stride, count);
      case 16:
        return detail::copy_small_blocks<16>(out, to_stride, in, from_stride, count);
      case 32:
        return detail::copy_small_blocks<32>(out, to_stride, in, from_stride, count);
      case 64:
        return detail::copy_small_blocks<64>(out, to_stride, in, from_stride, count);
      default:
        break;
    }
  }
  for (int64_t i = 0; i < count; ++i) copy_bytes(out + i * to_stride, in + i * from_stride, nbytes, device);
}

/// Gives a tensor's storage so many bytes, uninitialised; 0 frees them. The storage, its views and what autograd saved
/// of it stay the same objects.
inline void set_storage_size(const at::Tensor& tensor, int64_t nbytes) {
  auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(storage->allocator()->allocate(static_cast<size_t>(nbytes)));
  storage->set_nbytes(static_cast<size_t>(nbytes));
  if (tensor.is_cpu()) want_huge_pages(storage->data(), nbytes);
}

/// Makes a tensor's storage show memory of somebody else's, which must outlive that, or the next set_storage_size().
inline void lend_storage(const at::Tensor& tensor, void* memory, int64_t nbytes) {
  auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(memory, tensor.device()));
  storage->set_nbytes(static_cast<size_t>(nbytes));
}

/// Makes a tensor's storage show bytes of `memory`, and hold them until it is gone or the next set_storage_size().
inline void share_storage(const at::Tensor& tensor, const at::Tensor& memory, int64_t begin, int64_t nbytes) {
  auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  const auto let_go = [](void* held) { delete static_cast<at::Tensor*>(held); };
  storage->set_data_ptr_noswap(c10::DataPtr(static_cast<char*>(memory.mutable_data_ptr()) + begin,
                                            new at::Tensor(memory), let_go, tensor.device()));
  storage->set_nbytes(static_cast<size_t>(nbytes));
}

/// The first byte of a tensor's storage.
inline char* storage_bytes(const at::Tensor& tensor) {
  return static_cast<char*>(tensor.unsafeGetTensorImpl()->unsafe_storage().mutable_data());
}

}  // namespace fsdp::base
