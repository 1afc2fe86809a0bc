// Rows 3 and 4: a mixed precision policy with accumulation, and with parameters that are frozen and thawed.
#include "cases.h"

namespace fsdp::testing {
namespace {

const MixedPrecisionPolicy kPolicy{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};

struct TwoImpl : torch::nn::Module {
  TwoImpl() {
    a = register_module("a", ones_linear(4, 4));
    b = register_module("b", ones_linear(4, 4));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto sum = a(x).sum();
    return use_b ? sum + b(x).sum() : sum;
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
  bool use_b = true;
};
TORCH_MODULE(Two);

void expect_float_gradient(const at::Tensor& parameter, double value) {
  ASSERT_TRUE(parameter.grad().defined());
  const auto gradient = whole(parameter.grad());
  EXPECT_EQ(gradient.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(gradient, at::full({4, 4}, value))) << gradient << "\nexpected " << value;
}

TEST(PrecisionThreads, Row3AccumulateWithoutSyncThenUseMore) {
  run_ranks(2, [](int) {
    Two net;
    auto model = fully_shard(net, {.mp_policy = kPolicy});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model.set_requires_gradient_sync(false);
      net->use_b = false;
      model(at::ones({1, 4})).backward();
      model.set_requires_gradient_sync(true);
      net->use_b = true;
      model(at::ones({1, 4})).backward();
      expect_float_gradient(net->a->weight, 2.0);
      expect_float_gradient(net->b->weight, 1.0);
    }
  });
}

TEST(PrecisionThreads, Row4FreezeForwardThaw) {
  run_ranks(2, [](int) {
    Two net;
    auto model = fully_shard(net, {.mp_policy = kPolicy});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      for (auto& p : net->parameters()) p.requires_grad_(false);
      EXPECT_FALSE(model(at::ones({1, 4})).requires_grad());
      for (auto& p : net->parameters()) p.requires_grad_(true);
      model(at::ones({1, 4})).backward();
      expect_float_gradient(net->a->weight, 1.0);
      expect_float_gradient(net->b->weight, 1.0);
    }
  });
}

// The same with part of the model frozen, in the parameters' own dtype, against plain.
TEST(PrecisionThreads, FreezeAndThawPartsBetweenSteps) {
  Recipe<Stack> recipe;
  recipe.make = [] { return Stack(2, 6); };
  recipe.shard = shard_blocks;
  recipe.body = [](Side<Stack>& run) {
    torch::optim::SGD optimizer(run.net->parameters(), 0.1);
    Values values;
    for (int step = 0; step < 4; ++step) {
      for (auto& p : run.net->blocks[0]->parameters()) p.requires_grad_(step % 2 == 0);
      run.net->head->bias.requires_grad_(step % 2 == 1);
      optimizer.zero_grad();
      run.forward(at::linspace(-1, 1, 12).view({2, 6})).pow(2).sum().backward();
      optimizer.step();
      const auto now = parameters_and_gradients(*run.net);
      for (const auto& value : now) values.push_back(whole(value));
    }
    return values;
  };
  expect_like_plain(recipe);
}

}  // namespace
}  // namespace fsdp::testing
