#pragma once
#include <ATen/core/Tensor.h>
#include <fsdp/export.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

/// torch::optim's optimizers with the same options, state and results (to rounding), whose step is one fused,
/// vectorised kernel for all parameters of an option group that share a dtype and a device, on the bytes that this rank
/// holds. torch::optim's own run a dozen operators a parameter.
///
/// A complex parameter steps as its real and imaginary parts do (as in Python; C++'s torch::optim multiplies them).
/// Parameters may be sharded, plain, or both. A torch::optim::AdamW& to one of them works, and so do fsdp::save and
/// fsdp::load, in which they and torch::optim's are the same. Never communicates; every rank steps alike.
namespace fsdp::optim {

/// InvalidArgument: a sharded parameter's gradient that is not sharded like it, or a sparse gradient.
class FSDP_API AdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  /// Returns what `closure` returns, which is called first, with gradients being recorded.
  at::Tensor step(LossClosure closure = nullptr) override;
};

/// As AdamW.
class FSDP_API SGD : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace fsdp::optim
