#include "nets.h"

// The example's own model: what it trains is what is tested here.
#include "../../../examples/gpt/gpt_model.cc"

namespace fsdp::testing {
namespace {

struct GptNet : Net {
  explicit GptNet(const gpt::GPTConfig& config) : gpt(register_module("gpt", gpt::GPT(config))) {}
  at::Tensor forward(const at::Tensor& tokens) override {
    const auto logits = gpt(tokens);
    const auto count = tokens.size(1) - 1;
    // The loss inside, so that the case needs no targets.
    return torch::nn::functional::cross_entropy(logits.narrow(1, 0, count).flatten(0, 1),
                                                tokens.narrow(1, 1, count).flatten());
  }
  gpt::GPT gpt;
};

}  // namespace

std::function<NetPtr()> function_net(Fill fill, FunctionNet::Run run) {
  return [fill = std::move(fill), run = std::move(run)] {
    auto net = std::make_shared<FunctionNet>(run);
    fill(*net);
    return net;
  };
}

MlpNet::MlpNet(const std::vector<int64_t>& widths) {
  for (size_t i = 0; i + 1 < widths.size(); ++i) {
    layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(widths[i], widths[i + 1])));
  }
}

at::Tensor MlpNet::forward(const at::Tensor& x) {
  auto y = layers[0](x);
  for (size_t i = 1; i < layers.size(); ++i) y = layers[i](at::tanh(y));
  return y;
}

Case mlp(const std::vector<int64_t>& widths, int64_t samples) {
  Case c;
  c.make = [widths] { return std::make_shared<MlpNet>(widths); };
  c.batch = ramp({samples, widths[0]});
  return c;
}

Case wide_mlp(int64_t samples) {
  auto c = mlp({9, 770, 761, 760, 5}, samples);
  c.steps = 2;
  return c;
}

MlpNet& as_mlp(Net& net) { return dynamic_cast<MlpNet&>(net); }

FSDPModule<torch::nn::Linear> layer_group(Net& net, size_t i) { return fsdp_module(as_mlp(net).layers[i]); }

Case uneven_use_case(int ranks) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        for (const char* name : {"a", "b", "c"}) net.add(name, torch::nn::Linear(4, 4));
      },
      [](FunctionNet& net, const at::Tensor& x) {
        auto y = at::tanh(net.module<torch::nn::LinearImpl>("a").forward(x));
        const auto* way = x[0][0].item<double>() > 0 ? "b" : "c";
        return net.module<torch::nn::LinearImpl>(way).forward(y);
      });
  c.apart = true;
  c.batch = ramp({2 * ranks, 4});
  for (int r = 0; r < ranks; ++r) c.batch[2 * r][0] = r == 0 ? 1.0 : -1.0;
  return c;
}

Case gpt_case(int64_t samples, bool tied) {
  const gpt::GPTConfig config{.vocab = 19, .context = 8, .layers = 2, .heads = 2, .width = 8, .tied = tied};
  Case c;
  c.make = [config] { return std::make_shared<GptNet>(config); };
  c.batch = ramp({samples, config.context}).add(1).mul(9.4).to(at::kLong);
  c.loss = [](const at::Tensor& loss) { return loss; };
  c.shard_parts = [](Net& net, const FullyShardOptions& options) {
    for (auto& block : dynamic_cast<GptNet&>(net).gpt->blocks) fully_shard(block, options);
  };
  return c;
}

}  // namespace fsdp::testing
