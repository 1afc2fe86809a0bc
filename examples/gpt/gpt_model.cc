#include "gpt_model.h"

#include <cmath>
#include <string>

namespace gpt {

using torch::nn::Embedding;
using torch::nn::LayerNorm;
using torch::nn::LayerNormOptions;
using torch::nn::Linear;
using torch::nn::LinearOptions;

AttentionImpl::AttentionImpl(int64_t width, int64_t heads) : heads(heads) {
  TORCH_CHECK_VALUE(heads > 0 && width % heads == 0, "width ", width, " is not a multiple of heads ", heads);
  qkv = register_module("qkv", Linear(width, 3 * width));
  out = register_module("out", Linear(width, width));
}

at::Tensor AttentionImpl::forward(const at::Tensor& x) {
  const auto batch = x.size(0), time = x.size(1), width = x.size(2);
  // [3, batch, heads, time, width of a head]
  const auto parts = qkv(x).view({batch, time, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
  const auto mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], /*attn_mask=*/{},
                                                      /*dropout_p=*/0.0, /*is_causal=*/true);
  return out(mixed.transpose(1, 2).reshape({batch, time, width}));
}

BlockImpl::BlockImpl(int64_t width, int64_t heads) {
  norm1 = register_module("norm1", LayerNorm(LayerNormOptions({width})));
  attention = register_module("attention", Attention(width, heads));
  norm2 = register_module("norm2", LayerNorm(LayerNormOptions({width})));
  up = register_module("up", Linear(width, 4 * width));
  down = register_module("down", Linear(4 * width, width));
}

at::Tensor BlockImpl::forward(at::Tensor x) {
  x = x + attention(norm1(x));
  return x + down(at::gelu(up(norm2(x))));
}

GPTImpl::GPTImpl(const GPTConfig& config) : config(config) {
  token_embedding = register_module("token_embedding", Embedding(config.vocab, config.width));
  position_embedding = register_module("position_embedding", Embedding(config.context, config.width));
  torch::nn::ModuleList list;
  for (int64_t i = 0; i < config.layers; ++i) {
    blocks.emplace_back(config.width, config.heads);
    list->push_back(blocks.back());
  }
  register_module("blocks", list);
  norm = register_module("norm", LayerNorm(LayerNormOptions({config.width})));
  if (!config.tied) {
    head = register_module("head", Linear(LinearOptions(config.width, config.vocab).bias(false)));
  }
  initialise();
}

void GPTImpl::initialise() {
  torch::NoGradGuard no_grad;
  constexpr double kStd = 0.02;
  apply([](torch::nn::Module& module) {
    if (auto* linear = module.as<Linear>()) {
      linear->weight.normal_(0, kStd);
      if (linear->bias.defined()) linear->bias.zero_();
    } else if (auto* embedding = module.as<Embedding>()) {
      embedding->weight.normal_(0, kStd);
    }
  });
  // Every block adds twice to the residual stream: scale so that its variance does not grow with the depth.
  const double residual_std = kStd / std::sqrt(2.0 * static_cast<double>(config.layers));
  for (auto& block : blocks) {
    block->attention->out->weight.normal_(0, residual_std);
    block->down->weight.normal_(0, residual_std);
  }
}

at::Tensor GPTImpl::forward(const at::Tensor& tokens) {
  const auto positions = torch::arange(tokens.size(1), tokens.options());
  auto x = token_embedding(tokens) + position_embedding(positions);
  for (auto& block : blocks) x = block(x);
  x = norm(x);
  return head ? head(x) : at::linear(x, token_embedding->weight);
}

}  // namespace gpt
