#pragma once
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/InferenceMode.h>

namespace fsdp::engine {

/// For a scope: a user's code runs as between operators, without gradients. A gather, which calls it, may begin and end
/// within an operator, in any mode and below keys.
struct UserCode {
  c10::InferenceMode normal{false};
  at::NoGradGuard no_grad;
  c10::impl::ForceDispatchKeyGuard keys{c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{})};
};

}  // namespace fsdp::engine
