// reshard_after_forward = n: parameters are kept over n ranks between forward and backward.
#include <cstring>
#include <limits>

#include "nets.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

Case keeping(Case c, int64_t over) {
  c.options.reshard_after_forward = over;
  return c;
}

/// {ranks, ranks that keep the whole between them}.
struct KeepThreads : ::testing::TestWithParam<std::pair<int, int64_t>> {
  int ranks() const { return GetParam().first; }
  int64_t over() const { return GetParam().second; }
};

TEST_P(KeepThreads, Trains) { expect_parity(ranks(), keeping(mlp({6, 17, 9, 4}, 2 * ranks()), over())); }

TEST_P(KeepThreads, TrainsAGpt) { expect_parity(ranks(), keeping(gpt_case(ranks(), true), over())); }

TEST_P(KeepThreads, BackwardReadsWhatWasKept) {
  run_twins(ranks(), keeping(mlp({6, 17, 9, 4}, ranks()), over()), Grouping::kChildren, [&](Twin& twin, int) {
    const auto plain = twin.plain_loss();
    const auto sharded = twin.sharded_loss();
    const bool keeps = over() != 1 && over() != ranks();
    int64_t kept = 0, whole = 0;
    for (auto* group : twin.context().groups()) {
      if (group->params().empty()) continue;
      EXPECT_EQ(group->holds_part(), keeps);
      EXPECT_EQ(group->state() == engine::GatherState::kUnsharded, over() == 1);
      for (const auto& param : group->params()) {
        if (keeps) kept += static_cast<int64_t>(group->part_of(*param).nbytes());
        whole += param->numel() * 8;
      }
    }
    if (keeps) {
      EXPECT_NEAR(static_cast<double>(kept), static_cast<double>(whole) / static_cast<double>(over()), 0.35 * kept);
      // Behind the engine's back: what backward reads is not the shards.
      std::vector<at::Tensor> shards;
      for (const auto& parameter : twin.net().parameters()) {
        shards.push_back(dtensor(parameter).to_local().clone());
        if (shards.back().numel() == 0) continue;
        std::memset(dtensor(parameter).to_local().data_ptr(), 0xff, shards.back().nbytes());
      }
      sharded.backward();
      const auto parameters = twin.net().parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (shards[i].numel() == 0) continue;
        std::memcpy(dtensor(parameters[i]).to_local().data_ptr(), shards[i].data_ptr(), shards[i].nbytes());
      }
    } else {
      sharded.backward();
    }
    plain.backward();
    twin.expect_equal_gradients();
    for (auto* group : twin.context().groups()) EXPECT_FALSE(group->holds_part());
  });
}

TEST_P(KeepThreads, AnOptimizerStepInBetweenIsNotMissed) {
  run_twins(ranks(), keeping(mlp({6, 17, 4}, ranks()), over()), Grouping::kChildren, [&](Twin& twin, int) {
    // The graph of the second loss is built on the old values: gradients of linear layers' inputs read the new ones
    // only if they are gathered again, which autograd refuses.
    twin.train_step();
    const auto loss = twin.sharded_loss();
    {
      at::NoGradGuard no_grad;
      for (auto& parameter : twin.net().parameters()) parameter.mul_(2);
    }
    EXPECT_THROW(loss.backward(), std::exception);
    twin.model().reset_iter_state();
    {
      at::NoGradGuard no_grad;
      for (auto& parameter : twin.plain().parameters()) parameter.mul_(2);
    }
    twin.train_step();
    twin.expect_equal_parameters();
  });
}

TEST_P(KeepThreads, NothingIsKeptWithoutGradients) {
  run_twins(ranks(), keeping(mlp({6, 17, 4}, ranks()), over()), Grouping::kChildren, [&](Twin& twin, int) {
    {
      at::NoGradGuard no_grad;
      twin.sharded_loss();
      for (auto* group : twin.context().groups()) EXPECT_FALSE(group->holds_part());
    }
    // An evaluation between a forward and its backward lets go of what was kept, and the backward gathers all.
    const auto sharded = twin.sharded_loss();
    {
      at::NoGradGuard no_grad;
      twin.sharded_loss();
    }
    const auto plain = twin.plain_loss();
    plain.backward();
    sharded.backward();
    twin.expect_equal_gradients();
  });
}

TEST_P(KeepThreads, TwoForwardsThenTwoBackwards) {
  run_twins(ranks(), keeping(mlp({6, 17, 4}, ranks()), over()), Grouping::kChildren, [&](Twin& twin, int) {
    const auto first = twin.sharded_loss(), second = twin.sharded_loss(twin.the_case().batch.mul(2));
    const auto plain_first = twin.plain_loss(), plain_second = twin.plain_loss(twin.the_case().batch.mul(2));
    first.backward();
    second.backward();
    plain_first.backward();
    plain_second.backward();
    twin.expect_equal_gradients();
  });
}

// What a rank kept it can gather with others only if they kept theirs.
TEST_P(KeepThreads, AGroupThatSomeRanksDoNotUse) {
  auto c = keeping({}, over());
  c.make = function_net(
      [](FunctionNet& net) {
        net.add("a", torch::nn::Linear(6, 17));
        net.add("extra", torch::nn::Linear(17, 17));
        net.add("b", torch::nn::Linear(17, 3));
      },
      [](FunctionNet& net, const at::Tensor& x) {
        auto h = at::tanh(net.module<torch::nn::LinearImpl>("a").forward(x));
        if (x.sum().item<double>() > 0) h = h + at::tanh(net.module<torch::nn::LinearImpl>("extra").forward(h));
        return net.module<torch::nn::LinearImpl>("b").forward(h);
      });
  c.batch = ramp({ranks(), 6});
  c.apart = true;
  for (int64_t i = 0; i < ranks(); ++i) c.batch[i].abs_().mul_(i % 2 ? 1 : -1);
  run_twins(ranks(), c, Grouping::kChildren, [](Twin& twin, int) {
    for (int step = 0; step < 4; ++step) twin.train_step();
    twin.expect_equal_parameters();
  });
}

TEST_P(KeepThreads, TrueAgainByHand) {
  run_twins(ranks(), keeping(mlp({6, 17, 4}, ranks()), over()), Grouping::kChildren, [&](Twin& twin, int) {
    twin.model().set_reshard_after_forward(true);
    const auto loss = twin.sharded_loss();
    for (auto* group : twin.context().groups()) {
      EXPECT_FALSE(group->holds_part());
      EXPECT_EQ(group->state(), engine::GatherState::kSharded);
    }
    loss.backward();
    twin.plain_loss().backward();
    twin.expect_equal_gradients();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, KeepThreads,
                         ::testing::Values(std::pair{2, 1}, std::pair{2, 2}, std::pair{4, 2}, std::pair{6, 2},
                                           std::pair{6, 3}),
                         [](const auto& info) {
                           return std::to_string(info.param.first) + "Over" + std::to_string(info.param.second);
                         });

TEST(KeepHybridThreads, Trains) {
  auto c = keeping(mlp({6, 17, 4}, 8), 2);
  c.mesh_shape = {2, 4};
  expect_parity(8, c);
}

TEST(KeepRefusalThreads, ANumberThatDoesNotDivide) {
  run_ranks(4, [](int) {
    for (const int64_t over : {3, 0, -2, 8}) {
      torch::nn::Linear linear(5, 4);
      try {
        fully_shard(linear, {.mesh = init_device_mesh(at::kCPU, {4}), .reshard_after_forward = over});
        ADD_FAILURE() << over << " was taken";
      } catch (const InvalidArgument& error) {
        EXPECT_NE(std::string(error.what()).find("expected a factor of 4"), std::string::npos) << error.what();
      }
    }
  });
}

}  // namespace
}  // namespace fsdp::testing
