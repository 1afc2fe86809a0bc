#include "sharding.h"

#include <utility>

namespace gpt {

Model::Model(GPT net, const ShardingOptions& options) : net_(std::move(net)) {
  if (!options.enabled) return;
  fsdp::FullyShardOptions shard{.mesh = fsdp::init_device_mesh(torch::kCPU, {fsdp::world_size()}, {"dp"})};
  if (!options.reshard_after_forward) shard.reshard_after_forward = false;
  if (options.bf16) {
    shard.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat, .output_dtype = torch::kFloat};
  }
  for (auto& block : net_->blocks) fsdp::fully_shard(block, shard);
  handle_ = fsdp::fully_shard(net_, shard);
}

at::Tensor Model::operator()(const at::Tensor& tokens) const {
  return handle_ ? (*handle_)(tokens) : net_.ptr()->forward(tokens);
}

void Model::set_requires_gradient_sync(bool sync) {
  if (handle_) handle_->set_requires_gradient_sync(sync);
}

}  // namespace gpt
