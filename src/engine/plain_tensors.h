#pragma once
#include <ATen/core/LegacyTypeDispatch.h>

namespace fsdp::engine {

/// For a scope: views that are handed out, or that only the engine sees, must not be autograd views.
struct PlainTensors {
  at::AutoDispatchBelowADInplaceOrView below;
};

}  // namespace fsdp::engine
