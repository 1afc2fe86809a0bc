#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "comm/channel.h"

namespace fsdp::tensor {

/// A vector norm's order, in a form that ranks can combine: each rank reduces what it holds to one number, `combine`
/// joins the numbers, `finish` makes the norm.
class NormOrder {
 public:
  explicit NormOrder(double order) : order_(order) {}
  /// A 0-dim tensor; also where `local` is empty.
  at::Tensor local(const at::Tensor& local) const;
  comm::ReduceOp combine() const;
  at::Tensor finish(const at::Tensor& joined) const;

 private:
  double order_;
};

/// Whether `op` makes one number of a whole tensor (norm, sum, mean, max, dot, ...), in the overload without dims.
bool reduces_to_scalar(const c10::OperatorHandle& op);
/// Runs such an operator over a sharded tensor: locally, then one all-reduce. Collective.
void run_reduction(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace fsdp::tensor
