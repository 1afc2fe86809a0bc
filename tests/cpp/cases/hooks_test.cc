// Row 20: a user's hooks on a parameter, registered before and after sharding.
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "cases.h"

namespace fsdp::testing {
namespace {

struct PostHook : torch::autograd::PostAccumulateGradHook {
  explicit PostHook(std::function<void(const at::Tensor&)> f) : fn(std::move(f)) {}
  void operator()(const at::Tensor& parameter) override { fn(parameter); }
  std::function<void(const at::Tensor&)> fn;
};

void set_post_hook(const at::Tensor& parameter, std::function<void(const at::Tensor&)> fn) {
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<PostHook>(std::move(fn)));
}

struct HooksThreads : ::testing::TestWithParam<bool> {};

TEST_P(HooksThreads, Row20FullGradientThenReducedShard) {
  const bool before = GetParam();
  run_ranks(2, [before](int rank) {
    auto net = ones_linear(4, 5);
    const auto& weight = net->weight;
    int hooks = 0, posts = 0;
    const auto add_hooks = [&] {
      weight.register_hook([&](const at::Tensor& gradient) {
        ++hooks;
        EXPECT_FALSE(is_dtensor(gradient));
        EXPECT_EQ(gradient.sizes(), (std::vector<int64_t>{5, 4}));
        // This rank's own gradient, before anything is reduced.
        EXPECT_TRUE(at::equal(gradient, at::full({5, 4}, rank + 1.f))) << gradient;
        return gradient * 10;
      });
      set_post_hook(weight, [&](const at::Tensor& parameter) {
        ++posts;
        ASSERT_TRUE(parameter.grad().defined());
        ASSERT_TRUE(is_dtensor(parameter.grad()));
        const auto local = dtensor(parameter.grad()).to_local();
        EXPECT_EQ(local.size(0), rank == 0 ? 3 : 2);
        EXPECT_TRUE(at::equal(local, at::full_like(local, 15))) << local;
      });
    };
    if (before) add_hooks();
    auto model = fully_shard(net);
    if (!before) add_hooks();
    for (int step = 1; step <= 3; ++step) {
      net->zero_grad();
      model(at::full({1, 4}, rank + 1.0)).sum().backward();
      EXPECT_EQ(hooks, step);
      EXPECT_EQ(posts, step);
      EXPECT_TRUE(at::equal(whole(weight.grad()), at::full({5, 4}, 15.f)));
    }
  });
}

// Several hooks, each seeing what the one before made; removing one.
TEST_P(HooksThreads, SeveralHooksInOrder) {
  const bool before = GetParam();
  run_ranks(2, [before](int) {
    auto net = ones_linear(4, 5);
    unsigned first = 0;
    const auto add_hooks = [&] {
      first = net->weight.register_hook([](const at::Tensor& g) { return g + 1; });
      net->weight.register_hook([](const at::Tensor& g) { return g * 10; });
    };
    if (before) add_hooks();
    auto model = fully_shard(net);
    if (!before) add_hooks();
    model(at::ones({1, 4})).sum().backward();
    EXPECT_TRUE(at::equal(whole(net->weight.grad()), at::full({5, 4}, 20.f)));
    net->weight.remove_hook(first);
    net->zero_grad();
    model(at::ones({1, 4})).sum().backward();
    EXPECT_TRUE(at::equal(whole(net->weight.grad()), at::full({5, 4}, 10.f)));
  });
}

// A hook that changes a gradient in place, or writes into the tensor that it was given, is seen by the reduction alone.
TEST_P(HooksThreads, AHookThatReturnsNothing) {
  const bool before = GetParam();
  run_ranks(2, [before](int) {
    auto net = ones_linear(4, 5);
    at::Tensor seen;
    const auto add_hook = [&] { net->weight.register_hook([&](const at::Tensor& g) { seen = g; }); };
    if (before) add_hook();
    auto model = fully_shard(net);
    if (!before) add_hook();
    model(at::ones({1, 4})).sum().backward();
    EXPECT_TRUE(at::equal(whole(net->weight.grad()), at::ones({5, 4})));
    // What a hook kept stays whole and its own.
    EXPECT_TRUE(at::equal(seen, at::ones({5, 4})));
  });
}

// The optimizer in the hook: parameters step as their gradients are ready, and gradients are dropped at once.
TEST_P(HooksThreads, OptimizerInAPostAccumulateHook) {
  const bool before = GetParam();
  Recipe<Stack> recipe;
  std::map<torch::nn::Module*, std::vector<std::shared_ptr<torch::optim::Optimizer>>> optimizers;
  const auto add_hooks = [&optimizers](Stack& net) {
    auto& mine = optimizers[net.get()];
    for (auto& p : net->parameters()) {
      mine.push_back(std::make_shared<torch::optim::AdamW>(std::vector<at::Tensor>{p}, 0.02));
      set_post_hook(p, [optimizer = mine.back().get()](const at::Tensor&) {
        optimizer->step();
        optimizer->zero_grad();
      });
    }
  };
  recipe.make = [&] {
    Stack net(2, 5);
    optimizers[net.get()];
    if (before) add_hooks(net);
    return net;
  };
  recipe.shard = shard_blocks;
  recipe.body = [&](Side<Stack>& run) {
    if (!before) add_hooks(run.net);
    for (int step = 0; step < 3; ++step) {
      run.forward(at::linspace(-1, 1, 10).view({2, 5})).pow(2).mean().backward();
    }
    for (const auto& p : run.net->parameters()) EXPECT_FALSE(p.grad().defined());
    return run.net->parameters();
  };
  expect_like_plain(recipe);
}

INSTANTIATE_TEST_SUITE_P(Registered, HooksThreads, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "BeforeSharding" : "AfterSharding"; });

// With accumulation the full-gradient hook runs a micro-batch, the post-accumulate hook once the gradient is reduced.
TEST(HooksThreads, WithoutSyncOnlyTheFirstRuns) {
  run_ranks(2, [](int) {
    auto net = ones_linear(4, 5);
    auto model = fully_shard(net);
    int hooks = 0, posts = 0;
    net->weight.register_hook([&](const at::Tensor&) { ++hooks; });
    set_post_hook(net->weight, [&](const at::Tensor&) { ++posts; });
    model.set_requires_gradient_sync(false);
    model(at::ones({1, 4})).sum().backward();
    EXPECT_EQ(hooks, 1);
    EXPECT_EQ(posts, 0);
    EXPECT_FALSE(net->weight.grad().defined());
    model.set_requires_gradient_sync(true);
    model(at::ones({1, 4})).sum().backward();
    EXPECT_EQ(hooks, 2);
    EXPECT_EQ(posts, 1);
    EXPECT_TRUE(at::equal(whole(net->weight.grad()), at::full({5, 4}, 2.f)));
  });
}

}  // namespace
}  // namespace fsdp::testing
