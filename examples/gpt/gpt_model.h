#pragma once
#include <cstdint>
#include <vector>

#include <torch/torch.h>

/// A GPT as one would write it for plain libtorch: nothing here knows that it may be sharded.
namespace gpt {

struct GPTConfig {
  int64_t vocab = 256;  ///< byte-level text
  int64_t context = 128;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t width = 128;
  bool tied = false;  ///< the head reads the token embedding's weight
};

/// Causal self-attention over [batch, time, width].
struct AttentionImpl : torch::nn::Module {
  AttentionImpl(int64_t width, int64_t heads);
  at::Tensor forward(const at::Tensor& x);

  int64_t heads;
  torch::nn::Linear qkv{nullptr}, out{nullptr};
};
TORCH_MODULE(Attention);

/// A pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)).
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, int64_t heads);
  at::Tensor forward(at::Tensor x);

  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  Attention attention{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

/// Tokens [batch, time] (int64, time <= context) to logits [batch, time, vocab].
/// The initial values come from torch's default generator: torch::manual_seed before construction.
struct GPTImpl : torch::nn::Module {
  explicit GPTImpl(const GPTConfig& config);
  at::Tensor forward(const at::Tensor& tokens);

  GPTConfig config;
  torch::nn::Embedding token_embedding{nullptr}, position_embedding{nullptr};
  std::vector<Block> blocks;
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};  // empty when tied

 private:
  void initialise();
};
TORCH_MODULE(GPT);

}  // namespace gpt
