#pragma once
#include <optional>
#include <vector>

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include "gpt_model.h"

namespace gpt {

struct ShardingOptions {
  bool enabled = true;
  bool reshard_after_forward = true;
  bool bf16 = false;
};

/// The model that is trained: the plain GPT, or the same one sharded. The rest of the program does not care which.
class Model {
 public:
  /// Collective if enabled: every block becomes a group, and so does what is left.
  Model(GPT net, const ShardingOptions& options);

  at::Tensor operator()(const at::Tensor& tokens) const;
  /// False: backward keeps its gradients to itself, as in all but the last micro-batch of a step.
  void set_requires_gradient_sync(bool sync);

  bool sharded() const { return handle_.has_value(); }
  const GPT& net() const { return net_; }
  std::vector<at::Tensor> parameters() const { return net_->parameters(); }

 private:
  GPT net_;
  std::optional<fsdp::FSDPModule<GPT>> handle_;
};

}  // namespace gpt
