// fsdp::ShardedGradScaler: ranks do alike, whichever of them overflowed.
#include <fsdp/grad_scaler.h>

#include <limits>

#include "nets.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

/// A sharded net with two optimizers, and the same net unsharded.
struct Training {
  explicit Training(MixedPrecisionPolicy policy = {})
      : net(make()), plain(make()), model(fully_shard(net, {.mp_policy = policy})) {
    const auto parameters = net->parameters();
    first = std::make_unique<torch::optim::SGD>(std::vector(parameters.begin(), parameters.begin() + 1), 0.1);
    second = std::make_unique<torch::optim::SGD>(std::vector(parameters.begin() + 1, parameters.end()), 0.1);
  }

  static NetPtr make() {
    auto net = std::make_shared<FunctionNet>([](FunctionNet& self, const at::Tensor& x) {
      return self.module<torch::nn::LinearImpl>("b").forward(
          at::tanh(self.module<torch::nn::LinearImpl>("a").forward(x)));
    });
    net->add("a", torch::nn::Linear(6, 7));
    net->add("b", torch::nn::Linear(7, 1));  // of one row: the shard of rank 1 is empty
    for (auto& parameter : net->parameters()) parameter.set_data(ramp(parameter.sizes().vec()).to(at::kFloat));
    return net;
  }

  at::Tensor loss() { return model(ramp({4, 6}).to(at::kFloat)).pow(2).mean(); }
  /// Puts `value` into the shard that `rank` holds of a gradient of `optimizer`.
  static void spoil(torch::optim::Optimizer& optimizer, double value) {
    dtensor(optimizer.param_groups()[0].params()[0].grad()).to_local().fill_(value);
  }
  at::Tensor weights() { return dtensor(net->parameters()[0]).full_tensor(); }

  NetPtr net, plain;
  FSDPModule<NetPtr> model;
  std::unique_ptr<torch::optim::SGD> first, second;
};

TEST(GradScalerThreads, StepsLikeTheUnscaled) {
  run_ranks(3, [](int) {
    Training training;
    ShardedGradScaler scaler({.init_scale = 1024});
    const auto loss = training.loss();
    EXPECT_EQ(scaler.scale(loss).item<float>(), loss.item<float>() * 1024);
    scaler.scale(loss).backward();
    scaler.unscale_(*training.first);
    auto expected = training.plain->forward(ramp({4, 6}).to(at::kFloat)).pow(2).mean();
    expected.backward();
    EXPECT_LT(
        difference(dtensor(training.net->parameters()[0].grad()).full_tensor(), training.plain->parameters()[0].grad()),
        1e-6);
    EXPECT_TRUE(scaler.step(*training.first));
    EXPECT_TRUE(scaler.step(*training.second));
    scaler.update();
    torch::optim::SGD(training.plain->parameters(), 0.1).step();
    for (size_t i = 0; i < training.net->parameters().size(); ++i) {
      EXPECT_LT(difference(dtensor(training.net->parameters()[i]).full_tensor(), training.plain->parameters()[i]),
                1e-6);
    }
    EXPECT_EQ(scaler.get_scale(), 1024);
  });
}

TEST(GradScalerThreads, AnOverflowInOneShardStopsAll) {
  run_ranks(2, [](int rank) {
    for (const double bad : {kInf, -kInf, std::nan("")}) {
      Training training;
      ShardedGradScaler scaler({.init_scale = 8, .growth_interval = 2});
      const auto before = training.weights();
      scaler.scale(training.loss()).backward();
      if (rank == 1) Training::spoil(*training.first, bad);
      EXPECT_FALSE(scaler.step(*training.first)) << bad;
      EXPECT_TRUE(scaler.step(*training.second)) << "an optimizer of its own, all of whose gradients are finite";
      scaler.update();
      EXPECT_TRUE(training.weights().equal(before));
      EXPECT_EQ(scaler.get_scale(), 4);
      EXPECT_EQ(scaler.state_dict().growth_tracker, 0);
    }
  });
}

TEST(GradScalerThreads, GrowsAfterAnIntervalWithoutOverflow) {
  run_ranks(2, [](int rank) {
    Training training;
    ShardedGradScaler scaler({.init_scale = 8, .growth_factor = 4, .growth_interval = 2},
                             init_device_mesh(at::kCPU, {2}));
    std::vector<double> scales;
    for (int step = 0; step < 6; ++step) {
      training.first->zero_grad();
      scaler.scale(training.loss()).backward();
      if (step == 3 && rank == 0) Training::spoil(*training.first, kInf);
      scaler.step(*training.first);
      scaler.update();
      scales.push_back(scaler.get_scale());
    }
    EXPECT_EQ(scales, (std::vector<double>{8, 32, 32, 16, 16, 64}));
  });
}

TEST(GradScalerThreads, HalfPrecision) {
  run_ranks(2, [](int) {
    Training training({.param_dtype = at::kHalf});
    ShardedGradScaler scaler({.init_scale = 1e9});  // more than a half holds
    const auto before = training.weights();
    const auto loss = training.loss();
    ASSERT_EQ(loss.scalar_type(), at::kHalf);
    scaler.scale(loss).backward();
    EXPECT_FALSE(scaler.step(*training.first));
    scaler.update(64);
    EXPECT_TRUE(training.weights().equal(before));
    training.first->zero_grad();
    scaler.scale(training.loss()).backward();
    EXPECT_TRUE(scaler.step(*training.first));
    EXPECT_FALSE(training.weights().equal(before));
    EXPECT_TRUE(training.weights().isfinite().all().item<bool>());
  });
}

TEST(GradScalerThreads, OneUnscaleAndOneStepAnIteration) {
  run_ranks(2, [](int) {
    Training training;
    ShardedGradScaler scaler;
    EXPECT_THROW(scaler.update(), Error);
    scaler.scale(training.loss()).backward();
    scaler.unscale_(*training.first);
    EXPECT_THROW(scaler.unscale_(*training.first), Error);
    scaler.step(*training.first);
    EXPECT_THROW(scaler.step(*training.first), Error);
    EXPECT_THROW(scaler.unscale_(*training.first), Error);
    scaler.update();
    scaler.unscale_(*training.first);
  });
}

TEST(GradScaler, PlainParametersAndHalves) {
  auto weight = at::ones({3}, at::kHalf).requires_grad_(true);
  torch::optim::SGD optimizer(std::vector{weight}, 1);
  ShardedGradScaler scaler({.init_scale = 4});
  weight.mutable_grad() = at::full({3}, 2, at::kHalf);
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_TRUE(weight.equal(at::full({3}, 0.5, at::kHalf)));
  ShardedGradScaler strict({.allow_fp16_gradients = false});
  EXPECT_THROW(strict.unscale_(optimizer), InvalidArgument);
}

TEST(GradScaler, StateAndSettings) {
  ShardedGradScaler scaler({.init_scale = 4});
  scaler.set_growth_factor(3);
  scaler.set_backoff_factor(0.25);
  scaler.set_growth_interval(7);
  scaler.update(5);
  ShardedGradScaler other;
  other.load_state_dict(scaler.state_dict());
  EXPECT_EQ(other.get_scale(), 5);
  EXPECT_EQ(other.get_growth_factor(), 3);
  EXPECT_EQ(other.get_backoff_factor(), 0.25);
  EXPECT_EQ(other.get_growth_interval(), 7);
  EXPECT_THROW(other.set_growth_factor(1), InvalidArgument);
  EXPECT_THROW(other.set_backoff_factor(1), InvalidArgument);
  EXPECT_THROW(other.set_growth_interval(0), InvalidArgument);
  EXPECT_THROW(other.update(0), InvalidArgument);
  EXPECT_THROW(ShardedGradScaler({.init_scale = -1}), InvalidArgument);
}

TEST(GradScaler, NotEnabled) {
  auto weight = at::ones({3}).requires_grad_(true);
  torch::optim::SGD optimizer(std::vector{weight}, 1);
  ShardedGradScaler scaler({.enabled = false});
  weight.mutable_grad() = at::full({3}, kInf);
  EXPECT_EQ(scaler.scale(at::ones({})).item<float>(), 1);
  scaler.unscale_(optimizer);
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 1);
  EXPECT_FALSE(scaler.is_enabled());
}

}  // namespace
}  // namespace fsdp::testing
