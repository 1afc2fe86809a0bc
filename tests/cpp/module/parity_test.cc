#include "parity.h"

namespace fsdp::testing {
namespace {

using torch::nn::Linear;
using Any = std::shared_ptr<torch::nn::SequentialImpl>;

struct ParityThreads : ::testing::TestWithParam<int> {};

template <class M>
void shard_children(M& model, const DeviceMesh& mesh) {
  for (auto& child : model->children()) {
    if (!child->parameters().empty()) fully_shard(child, {.mesh = mesh});
  }
}

TEST_P(ParityThreads, Mlp) {
  const int ranks = GetParam();
  Case<torch::nn::Sequential> c;
  c.make = [] { return torch::nn::Sequential(Linear(8, 17), torch::nn::ReLU(), Linear(17, 5)); };
  c.loss = [](auto& model, const at::Tensor& x) { return model->forward(x).pow(2).mean(); };
  c.batch = torch::linspace(-1, 1, 2 * ranks * 8).view({2 * ranks, 8});
  expect_parity(ranks, c);
  c.shard_parts = shard_children<torch::nn::Sequential>;
  expect_parity(ranks, c);
}

INSTANTIATE_TEST_SUITE_P(Ranks, ParityThreads, ::testing::Values(1, 2, 3, 5));

}  // namespace
}  // namespace fsdp::testing
