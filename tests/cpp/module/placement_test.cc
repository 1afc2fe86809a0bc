// Parameters that are cut along another dim than the first.
#include "nets.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

/// Along the longest dim whose size the ranks divide evenly; dim 0 where there is none.
std::optional<Placement> along_the_longest(const at::Tensor& parameter, int64_t ranks) {
  int64_t best = 0;
  for (int64_t dim = 1; dim < parameter.dim(); ++dim) {
    if (parameter.size(dim) > parameter.size(best) && parameter.size(dim) % ranks == 0) best = dim;
  }
  if (best == 0) return std::nullopt;
  return Placement{Placement::Kind::kShard, best};
}

Case placed(Case c, int64_t ranks) {
  c.options.shard_placement_fn = [ranks](const at::Tensor& p) { return along_the_longest(p, ranks); };
  return c;
}

/// Weights {17, 30} along dim 1, {30, 17} along dim 0, {2, 60, 3} along dim 1, {3, 5, 30} along dim 2; biases of 17
/// rows, which no number of ranks here divides, make the segments ragged.
Case mixed(int64_t samples) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        net.add("down", torch::nn::Linear(30, 17));
        net.add("up", torch::nn::Linear(17, 30));
        net.add("left", torch::randn({2, 60, 3}, at::kDouble));
        net.add("right", torch::randn({3, 5, 30}, at::kDouble));
      },
      [](FunctionNet& net, const at::Tensor& x) {
        const auto h = net.module<torch::nn::LinearImpl>("up").forward(
            at::tanh(net.module<torch::nn::LinearImpl>("down").forward(x)));
        const auto pairs = at::einsum("bi,aic->bac", {at::cat({h, h}, 1), net.at("left")});
        return at::einsum("bac,cdi->bdi", {pairs, net.at("right")}).mul(0.1);
      });
  c.batch = ramp({samples, 30});
  return c;
}

struct PlacementThreads : OnRanks {};

TEST_P(PlacementThreads, Trains) { expect_parity(ranks(), placed(mixed(2 * ranks()), ranks())); }

TEST_P(PlacementThreads, TrainsWithoutResharding) {
  auto c = placed(mixed(2 * ranks()), ranks());
  c.options.reshard_after_forward = false;
  expect_parity(ranks(), c);
}

TEST_P(PlacementThreads, EvenSegments) { expect_parity(ranks(), placed(mlp({60, 30, 60}, 2 * ranks()), ranks())); }

TEST_P(PlacementThreads, AccumulatesUnshardedAndSharded) {
  run_twins(ranks(), placed(mixed(ranks()), ranks()), Grouping::kChildren, [](Twin& twin, int) {
    for (const bool sync : {false, false, true, true}) {
      twin.model().set_requires_gradient_sync(sync);
      twin.plain_loss().backward();
      twin.sharded_loss().backward();
    }
    twin.expect_equal_gradients();
  });
}

TEST_P(PlacementThreads, AFrozenOneThaws) {
  run_twins(ranks(), placed(mixed(ranks()), ranks()), Grouping::kOne, [](Twin& twin, int) {
    const auto freeze = [&](bool frozen) {
      for (auto* net : {&twin.plain(), &twin.net()}) {
        dynamic_cast<FunctionNet*>(net)->at("left").set_requires_grad(!frozen);
      }
    };
    freeze(true);
    twin.train_step();
    freeze(false);
    twin.train_step();
    twin.expect_equal_parameters();
  });
}

TEST_P(PlacementThreads, GathersInAnotherDtype) {
  auto c = placed(mlp({60, 30, 60}, 2 * ranks()), ranks());
  c.dtype = at::kFloat;
  c.tolerance = 2e-5;
  c.options.mp_policy.reduce_dtype = at::kDouble;
  expect_parity(ranks(), c);
}

TEST_P(PlacementThreads, ThePlacementIsSeen) {
  run_twins(ranks(), placed(mixed(ranks()), ranks()), Grouping::kOne, [&](Twin& twin, int rank) {
    auto& net = dynamic_cast<FunctionNet&>(twin.net());
    const auto right = dtensor(net.at("right"));
    EXPECT_EQ(right.placements()[0], (Placement{Placement::Kind::kShard, 2}));
    EXPECT_EQ(right.to_local().sizes(), (at::IntArrayRef{3, 5, 30 / ranks()}));
    EXPECT_TRUE(right.to_local().is_contiguous());
    const auto plain = dynamic_cast<FunctionNet&>(twin.plain()).at("right").detach();
    EXPECT_TRUE(at::equal(right.to_local(), plain.chunk(ranks(), 2)[static_cast<size_t>(rank)]));
    EXPECT_TRUE(at::equal(right.full_tensor(), plain));
  });
}

TEST_P(PlacementThreads, OperatorsOnTheParts) {
  run_twins(ranks(), placed(mixed(ranks()), ranks()), Grouping::kOne, [&](Twin& twin, int) {
    at::NoGradGuard no_grad;
    const auto check = [&](const auto& act) {
      const auto got = act(dynamic_cast<FunctionNet&>(twin.net()).at("right"));
      const auto expected = act(dynamic_cast<FunctionNet&>(twin.plain()).at("right"));
      EXPECT_LT(difference(is_dtensor(got) ? dtensor(got).full_tensor() : got, expected), 1e-12);
    };
    check([](const at::Tensor& w) { return w * ramp({3, 5, 30}); });
    check([](const at::Tensor& w) { return w * ramp({5, 30}); });
    check([](const at::Tensor& w) { return w + ramp({30}); });
    check([](const at::Tensor& w) { return w + ramp({3, 5, 1}); });
    check([](const at::Tensor& w) { return w + ramp({5, 1}); });
    check([](const at::Tensor& w) { return w.norm(); });
    check([](const at::Tensor& w) { return w.view(-1); });
    check([](const at::Tensor& w) { return w.view({-1}).mul(2).view({3, 5, 30}); });
    check([](const at::Tensor& w) { return w.view({15, 30}); });
    check([](const at::Tensor& w) { return w.copy_(ramp({3, 5, 30})); });
    EXPECT_THROW(dynamic_cast<FunctionNet&>(twin.net()).at("right") + ramp({7}), std::exception);

    // As one vector, cut apart again.
    const auto vector = torch::nn::utils::parameters_to_vector(twin.net().parameters());
    EXPECT_LT(
        difference(dtensor(vector).full_tensor(), torch::nn::utils::parameters_to_vector(twin.plain().parameters())),
        1e-12);
  });
}

TEST_P(PlacementThreads, ClipsTheNorm) {
  run_twins(ranks(), placed(mixed(ranks()), ranks()), Grouping::kChildren, [&](Twin& twin, int) {
    twin.plain_loss().backward();
    twin.sharded_loss().backward();
    const auto expected = torch::nn::utils::clip_grad_norm_(twin.plain().parameters(), 0.5);
    EXPECT_NEAR(clip_grad_norm_(twin.net().parameters(), 0.5).item<double>(), expected, 1e-9 * (1 + expected));
    twin.expect_equal_gradients();
  });
}

FSDP_ON_RANKS(PlacementThreads, 1, 2, 3, 5);

TEST(PlacementHybridThreads, Trains) {
  auto c = placed(mixed(8), 2);
  c.mesh_shape = {2, 2};
  expect_parity(4, c);
}

TEST(PlacementRefusalThreads, EveryRankSaysWhatIsWrong) {
  const auto error_with = [](Placement placement) {
    std::vector<std::string> errors(2);
    run_ranks(2, [&](int rank) {
      torch::nn::Linear linear(5, 4);
      FullyShardOptions options;
      options.mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
      options.shard_placement_fn = [&](const at::Tensor& p) {
        return p.dim() == 2 ? std::optional(placement) : std::nullopt;
      };
      try {
        fully_shard(linear, options);
      } catch (const InvalidArgument& error) {
        errors[static_cast<size_t>(rank)] = error.what();
      }
    });
    EXPECT_NE(errors[0], "");
    EXPECT_NE(errors[0].find("'weight'"), std::string::npos) << errors[0];
    EXPECT_NE(errors[1].find("'weight'"), std::string::npos) << errors[1];
    return errors[0];
  };
  EXPECT_NE(error_with({Placement::Kind::kShard, 1}).find("dim 1 has 5 rows, expected a multiple of 2"),
            std::string::npos);
  EXPECT_NE(error_with({Placement::Kind::kShard, 2}).find("no dim 2"), std::string::npos);
  EXPECT_NE(error_with({Placement::Kind::kShard, -3}).find("no dim -3"), std::string::npos);
  EXPECT_NE(error_with({Placement::Kind::kReplicate, 0}).find("ignored_params"), std::string::npos);
}

}  // namespace
}  // namespace fsdp::testing
