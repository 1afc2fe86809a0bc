#pragma once
#include <vector>

#include <ATen/core/Tensor.h>
#include <fsdp/export.h>

namespace fsdp {

/// What gathers of one parameter move in the place of its rows, and how rows are made of that: fewer bits, say. Shards,
/// gradients and optimizer states stay as they are; see FullyShardOptions::tensor_extension_fn.
///
/// Both are called for each gather, without gradients being recorded, on whatever thread gathers. What they throw fails
/// the forward or backward on every rank.
class FSDP_API TensorExtension {
 public:
  virtual ~TensorExtension() = default;

  /// Before a gather: what this rank sends for `rows`, its part of the parameter, in the parameter's own dtype. As many
  /// tensors, of the same sizes and dtypes, each time and on every rank: therefore `rows` is as large on all ranks,
  /// followed by zeros on one that holds fewer rows. Must not write to it.
  virtual std::vector<at::Tensor> pre_all_gather(const at::Tensor& rows) = 0;

  /// After it, once for each rank that holds rows: `sent` is what that rank sent, and `rows` is to be filled: that
  /// rank's part of the whole, as large as its pre_all_gather had it, in the dtype that parameters are used in
  /// (param_dtype of the policy, or the parameter's own). Neither tensor may be kept.
  virtual void post_all_gather(const std::vector<at::Tensor>& sent, const at::Tensor& rows) = 0;
};

}  // namespace fsdp
