#pragma once
#include <ATen/core/Tensor.h>

namespace fsdp::engine {

/// How a sharded parameter shows in its module. The engine owns the shard and the unsharded leaf; a face (the C++
/// facade, later Python's DTensor) owns what the user holds, and answers for it here.
class Slot {
 public:
  virtual ~Slot() = default;
  /// What the user's parameter says now. False too once the user's parameter is gone.
  virtual bool requires_grad() const = 0;
  /// Runs the hooks that the user registered on the parameter over an unsharded, unreduced gradient.
  virtual at::Tensor run_gradient_hooks(at::Tensor gradient) = 0;
  /// Adds this rank's rows of a reduced gradient to the parameter's .grad. `local` is a plain tensor that the slot
  /// may keep.
  virtual void accumulate_gradient(const at::Tensor& local) = 0;
  /// Runs the user's post-accumulate hooks; .grad holds the reduced shard.
  virtual void run_post_accumulate_hooks() = 0;
};

}  // namespace fsdp::engine
