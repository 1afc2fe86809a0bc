#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace fsdp::tensor {

/// Runs an operator over sharded tensors outside forward and backward: on the shards where that is what the operator
/// means for the whole (pointwise, in place, *_like, and reductions to a scalar, which are global); otherwise throws
/// NotSupported, naming the operator, the tensor and what to call instead. The arguments are the top of `stack`; the
/// results replace them.
void run_outside(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace fsdp::tensor
