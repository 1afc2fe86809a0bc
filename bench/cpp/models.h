#pragma once
#include <memory>
#include <string>
#include <vector>

#include <torch/torch.h>

/// The models that are measured. harness/torch_models.py holds the same ones, built in the same order.
namespace bench {

struct Layer : torch::nn::Module {
  virtual torch::Tensor forward(torch::Tensor x) = 0;
};

/// Attention (four Linear) and an MLP (two), each after a LayerNorm: 16 parameters.
struct Block : Layer {
  explicit Block(int64_t width) {
    using namespace torch::nn;
    norm1 = register_module("norm1", LayerNorm(LayerNormOptions({width})));
    query = register_module("query", Linear(width, width));
    key = register_module("key", Linear(width, width));
    value = register_module("value", Linear(width, width));
    out = register_module("out", Linear(width, width));
    norm2 = register_module("norm2", LayerNorm(LayerNormOptions({width})));
    up = register_module("up", Linear(width, 4 * width));
    down = register_module("down", Linear(4 * width, width));
  }

  torch::Tensor forward(torch::Tensor x) override {
    auto h = norm1(x);
    x = x + out(torch::scaled_dot_product_attention(query(h), key(h), value(h)));
    return x + down(torch::gelu(up(norm2(x))));
  }

  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear query{nullptr}, key{nullptr}, value{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};

/// Four parameters of any number of rows and as little compute as a group can have, for the scale in the world.
struct Rows : Layer {
  Rows(int64_t rows, int64_t columns) {
    a = register_parameter("a", torch::rand({rows, columns}));
    b = register_parameter("b", torch::rand({rows, columns}));
    c = register_parameter("c", torch::rand({rows, columns}));
    d = register_parameter("d", torch::rand({rows, columns}));
  }

  torch::Tensor forward(torch::Tensor x) override { return (x * a + b) * c + d; }

  torch::Tensor a, b, c, d;
};

/// Layers one after the other, named "0", "1", ...
struct Stack : Layer {
  void push_back(std::shared_ptr<Layer> layer) {
    layers.push_back(register_module(std::to_string(layers.size()), std::move(layer)));
  }

  torch::Tensor forward(torch::Tensor x) override {
    for (const auto& layer : layers) x = layer->forward(std::move(x));
    return x;
  }

  std::vector<std::shared_ptr<Layer>> layers;
};

}  // namespace bench
