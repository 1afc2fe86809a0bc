#include "sharding.h"

namespace gpt {

Model::Model(GPT net, const ShardingOptions& options) : net_(std::move(net)) {}

at::Tensor Model::operator()(const at::Tensor& tokens) const {
  auto net = net_;
  return net(tokens);
}

void Model::set_requires_gradient_sync(bool sync) {}

}  // namespace gpt
