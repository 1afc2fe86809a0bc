// Mixed precision against a plain run that does the same casts, hybrid meshes, the gradient divide factor.
#include "nets.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

struct PolicyThreads : OnRanks {};

/// A plain run's casts: parameters and inputs in bfloat16 where they are used, outputs as the policy says.
struct CastNet : Net {
  CastNet() : a(register_module("a", torch::nn::Linear(6, 17))), b(register_module("b", torch::nn::Linear(17, 4))) {}
  at::Tensor forward(const at::Tensor& x) override {
    if (!by_hand) return b(at::tanh(a(x)));
    const auto cast = [](const at::Tensor& t) { return t.to(at::kBFloat16); };
    const auto y = at::linear(cast(x), cast(a->weight), cast(a->bias));
    return at::linear(at::tanh(y), cast(b->weight), cast(b->bias)).to(at::kFloat);
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
  bool by_hand = false;
};

Case cast_case(std::optional<at::ScalarType> reduce_dtype, int ranks) {
  Case c;
  c.make = [] { return std::make_shared<CastNet>(); };
  c.batch = ramp({2 * ranks, 6});
  c.dtype = at::kFloat;
  c.options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = reduce_dtype, .output_dtype = at::kFloat};
  return c;
}

TEST_P(PolicyThreads, Bfloat16ComputeFloatReduce) {
  auto c = cast_case(at::kFloat, ranks());
  c.apart = true;  // bfloat16 kernels round by the shape of their batch
  c.tolerance = 2e-5;
  for (auto grouping : {Grouping::kOne, Grouping::kChildren}) {
    run_twins(ranks(), c, grouping, [](Twin& twin, int) {
      dynamic_cast<CastNet&>(twin.plain()).by_hand = true;
      for (int step = 0; step < 3; ++step) {
        twin.train_step();
        for (const auto& parameter : twin.net().parameters()) {
          EXPECT_EQ(parameter.scalar_type(), at::kFloat);
          EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
        }
      }
      twin.expect_equal_parameters();
      // Half the bytes are gathered, all are kept.
      for (auto* group : twin.context().groups()) {
        int64_t numel = 0;
        for (const auto& parameter : group->params()) numel += parameter->numel();
        EXPECT_EQ(group->unsharded_bytes(), 2 * numel);
      }
    });
  }
}

TEST_P(PolicyThreads, Bfloat16ReducesToo) {
  auto c = cast_case(std::nullopt, ranks());
  c.apart = true;
  c.tolerance = 3e-2;
  run_twins(ranks(), c, Grouping::kChildren, [](Twin& twin, int) {
    dynamic_cast<CastNet&>(twin.plain()).by_hand = true;
    for (int step = 0; step < 3; ++step) {
      twin.zero_grad();
      const auto plain = twin.plain_loss();
      const auto sharded = twin.sharded_loss();
      EXPECT_EQ(sharded.scalar_type(), at::kFloat);
      twin.expect_equal_losses(plain, sharded);
      plain.backward();
      sharded.backward();
      for (const auto& parameter : twin.net().parameters()) EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
    }
    twin.expect_equal_gradients();
  });
}

TEST_P(PolicyThreads, InputsAndOutputsAreCast) {
  auto c = cast_case(at::kFloat, ranks());
  c.options.mp_policy.output_dtype = at::kDouble;
  run_twins(ranks(), c, Grouping::kOne, [](Twin& twin, int) {
    EXPECT_EQ(twin.model()(twin.samples_here(twin.the_case().batch)).scalar_type(), at::kDouble);
  });
  c.options.mp_policy.cast_forward_inputs = false;
  run_twins(ranks(), c, Grouping::kOne, [](Twin& twin, int) {
    // A float input meets bfloat16 parameters.
    const auto x = twin.samples_here(twin.the_case().batch);
    EXPECT_ANY_THROW(twin.model()(x));
  });
}

TEST_P(PolicyThreads, ReduceInAWiderType) {
  auto c = mlp({6, 17, 4}, 2 * ranks());
  c.dtype = at::kFloat;
  c.tolerance = 2e-5;
  c.options.mp_policy.reduce_dtype = at::kDouble;
  expect_parity(ranks(), c);
}

TEST_P(PolicyThreads, GradientDivideFactor) {
  run_twins(ranks(), mlp({6, 17, 4}, 2 * ranks()), Grouping::kChildren, [&](Twin& twin, int) {
    twin.model().set_gradient_divide_factor(8);
    for (int step = 0; step < 2; ++step) {
      twin.zero_grad();
      (twin.plain_loss() * (ranks() / 8.0)).backward();
      twin.sharded_loss().backward();
      twin.expect_equal_gradients();
    }
  });
}

// Powers of two: the plain run's division by the number of ranks is then exact in bfloat16.
/// What PyTorch lets its users choose and libfsdp always does.
TEST_P(PolicyThreads, ControlsOfWhatIsSoAnyway) {
  auto c = mlp({6, 17, 4}, 2 * ranks());
  c.configure = [](Handle& model) {
    for (const bool enable : {true, false}) {
      model.set_reduce_scatter_unused_params(enable);
      model.set_force_sum_reduction_for_comms(enable);
      model.set_separate_reduce_scatter_group(enable);
      model.set_unshard_in_backward(enable);
      model.set_allocate_memory_from_process_group_for_comm(enable);
      model.set_is_last_backward(enable);
    }
    share_comm_ctx({model, model});
  };
  expect_parity(ranks(), c);
}

FSDP_ON_RANKS(PolicyThreads, 1, 2, 4);

struct HybridThreads : ::testing::TestWithParam<std::pair<int64_t, int64_t>> {
  int ranks() const { return static_cast<int>(GetParam().first * GetParam().second); }
  Case on_mesh(Case c) const {
    c.mesh_shape = {GetParam().first, GetParam().second};
    return c;
  }
};

TEST_P(HybridThreads, Mlp) { expect_parity(ranks(), on_mesh(mlp({6, 17, 9, 4}, 2 * ranks()))); }

TEST_P(HybridThreads, Gpt) { expect_parity(ranks(), on_mesh(gpt_case(ranks(), false))); }

TEST_P(HybridThreads, ShardsOverTheSecondAxis) {
  run_twins(ranks(), on_mesh(mlp({6, 18, 4}, ranks())), Grouping::kChildren, [&](Twin& twin, int) {
    const auto view = dtensor(as_mlp(twin.net()).layers[0]->weight);
    EXPECT_EQ(view.to_local().size(0), 18 / GetParam().second);
    EXPECT_EQ(view.placements()[0].kind, Placement::Kind::kReplicate);
    EXPECT_EQ(view.placements()[1].kind, Placement::Kind::kShard);
  });
}

// The replicas' all-reduce is left out of all but the last backward.
TEST_P(HybridThreads, AccumulatesWithoutAllReduce) {
  run_twins(ranks(), on_mesh(mlp({6, 17, 4}, 2 * ranks())), Grouping::kChildren, [&](Twin& twin, int) {
    for (int step = 0; step < 3; ++step) {
      twin.zero_grad();
      for (int i = 0; i < 3; ++i) {
        twin.model().set_requires_all_reduce(i == 2);
        const auto before = twin.context().stats().all_reduces;
        const auto batch = twin.the_case().batch * (1.0 + i);
        twin.plain_loss(batch).backward();
        twin.sharded_loss(batch).backward();
        const bool expected = i == 2 && GetParam().first > 1;
        EXPECT_EQ(twin.context().stats().all_reduces - before, expected ? 2 : 0);
      }
      twin.expect_equal_gradients();
      twin.optimizer_step();
    }
    twin.expect_equal_parameters();
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, HybridThreads,
                         ::testing::Values(std::pair<int64_t, int64_t>{2, 2}, std::pair<int64_t, int64_t>{2, 1},
                                           std::pair<int64_t, int64_t>{1, 2}));

}  // namespace
}  // namespace fsdp::testing
