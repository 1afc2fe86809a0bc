#pragma once
#include <functional>

#include <ATen/core/Tensor.h>
#include <fsdp/export.h>

/// Collectives of a user's own, for one group: see FSDPModuleBase::set_custom_all_gather and set_custom_reduce_scatter.
///
/// The buffers are 1-D and even: a rank's part is as long as the longest of them, the rest is padding whose values mean
/// nothing. All ranks call alike, in the engine's order.
namespace fsdp {

/// Waits for what was started; empty if it is done already.
using WaitFn = std::function<void()>;

/// Where the buffers of a collective of one's own come from.
class FSDP_API CustomComm {
 public:
  virtual ~CustomComm() = default;
  /// An uninitialised, contiguous tensor of `numel` elements; by default a new one. May give the same memory again once
  /// the collective that it was for has been waited for.
  virtual at::Tensor allocate(int64_t numel, const at::TensorOptions& options);
};

class FSDP_API CustomAllGather : public CustomComm {
 public:
  /// output[r * n .. (r + 1) * n) = rank r's `input`, of n elements. In the dtype that parameters are gathered in, or
  /// in bytes where a group has several.
  virtual WaitFn run(const at::Tensor& output, const at::Tensor& input) = 0;
};

class FSDP_API CustomReduceScatter : public CustomComm {
 public:
  /// output = the sum over all ranks of their `input`'s part [r * n .. (r + 1) * n) for this rank r, not divided: the
  /// engine averages. In the dtype that gradients are reduced in; once for each where a group has several.
  virtual WaitFn run(const at::Tensor& output, const at::Tensor& input) = 0;
};

}  // namespace fsdp
