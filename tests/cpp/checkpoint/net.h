#pragma once
#include <cstdint>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fsdp/checkpoint.h>

namespace fsdp::testing {

/// A small model with what is awkward to shard: 17 rows, a scalar, a parameter of fewer rows than ranks, a tied
/// weight, buffers.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(uint64_t seed = 1) {
    const torch::NoGradGuard no_grad;
    auto generator = at::detail::createCPUGenerator(seed);
    const auto random = [&](at::IntArrayRef sizes) { return torch::randn(sizes, generator).mul_(0.3); };
    in = register_module("in", torch::nn::Linear(6, 17));
    out = register_module("out", torch::nn::Linear(17, 5));
    for (auto& p : parameters()) {
      p.copy_(random(p.sizes()));
    }
    scale = register_parameter("scale", torch::ones({}) + 0.1 * random({}));
    row = register_parameter("row", random({1, 17}));
    tied = register_parameter("tied", in->weight);
    mean = register_buffer("mean", random({5}));
    calls = register_buffer("calls", torch::full({}, static_cast<int64_t>(seed), torch::kLong));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    calls += 1;
    auto hidden = torch::tanh(in->forward(x)) * row * scale;
    return out->forward(hidden) + mean + torch::matmul(hidden, tied).slice(1, 0, 5) * 0.1;
  }

  torch::nn::Linear in{nullptr}, out{nullptr};
  torch::Tensor scale, row, tied, mean, calls;
};
TORCH_MODULE(Net);

/// Step `step`'s share of a batch of 12 for this rank of `world`.
inline torch::Tensor batch(int64_t step, int64_t rank = 0, int64_t world = 1) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(1000 + step));
  return torch::randn({12, 6}, generator).chunk(world)[rank];
}

/// Trains steps [begin, end); returns each step's loss on this rank's share. Model: Net or FSDPModule<Net>.
template <class Model>
std::vector<double> train(Model& model, torch::optim::Optimizer& optimizer, int64_t begin, int64_t end,
                          int64_t rank = 0, int64_t world = 1) {
  std::vector<double> losses;
  for (int64_t step = begin; step < end; ++step) {
    optimizer.zero_grad();
    auto loss = model(batch(step, rank, world)).pow(2).mean();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.template item<double>());
  }
  return losses;
}

inline void expect_equal(const StateDict& got, const StateDict& expected, double tolerance = 0) {
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& item : expected) {
    ASSERT_TRUE(got.contains(item.key())) << item.key();
    const auto& value = got[item.key()];
    EXPECT_EQ(value.sizes(), item.value().sizes()) << item.key();
    EXPECT_EQ(value.scalar_type(), item.value().scalar_type()) << item.key();
    EXPECT_TRUE(tolerance == 0 ? torch::equal(value, item.value())
                               : torch::allclose(value, item.value(), tolerance, tolerance))
        << item.key() << ": " << value << " expected " << item.value();
  }
}

}  // namespace fsdp::testing
