// CPUOffloadPolicy: state in host memory. On CPU meshes nothing is copied; here the engine copies all the same, so that
// gathers from copies, and gradients by way of copies, are seen to be right. Streams: StreamsTest.
#include "module/module_state.h"
#include "nets.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

Case offloaded(Case c) {
  c.options.offload_policy = CPUOffloadPolicy{};
  c.wrap = [options = c.options, shape = c.mesh_shape](const NetPtr& net, Grouping grouping) {
    auto each = options;
    each.mesh = init_device_mesh(at::kCPU, shape.empty() ? std::vector<int64_t>{world_size()} : shape);
    const module::Face copies{.name = "fully_shard", .layout = engine::Layout::kRows, .offloads_on_cpu = true};
    if (grouping == Grouping::kChildren) {
      for (const auto& child : net->children()) module::make_state({child}, each, copies);
    }
    return Handle(net, module::make_state({net}, each, copies));
  };
  return c;
}

struct OffloadThreads : OnRanks {};

TEST_P(OffloadThreads, Trains) { expect_parity(ranks(), offloaded(mlp({12, 7, 9, 12}, 2 * ranks()))); }

TEST_P(OffloadThreads, TrainsInAnotherDtype) {
  auto c = mlp({12, 7, 12}, 2 * ranks());
  c.dtype = at::kFloat;
  c.tolerance = 2e-5;
  c.options.mp_policy.reduce_dtype = at::kDouble;
  expect_parity(ranks(), offloaded(c));
}

TEST_P(OffloadThreads, AccumulatesOnTheHost) {
  run_twins(ranks(), offloaded(mlp({12, 7, 12}, 2 * ranks())), Grouping::kChildren, [](Twin& twin, int) {
    for (const bool sync : {false, true, true}) {
      twin.model().set_requires_gradient_sync(sync);
      twin.plain_loss().backward();
      twin.sharded_loss().backward();
    }
    twin.expect_equal_gradients();
  });
}

struct PostHook : torch::autograd::PostAccumulateGradHook {
  explicit PostHook(std::function<void(const at::Tensor&)> f) : fn(std::move(f)) {}
  void operator()(const torch::autograd::Variable& parameter) override { fn(parameter); }
  std::function<void(const at::Tensor&)> fn;
};

TEST_P(OffloadThreads, HooksRunWithTheGradientInPlace) {
  run_twins(ranks(), offloaded(mlp({12, 7, 12}, 2 * ranks())), Grouping::kOne, [](Twin& twin, int) {
    auto& weight = as_mlp(twin.net()).layers[0]->weight;
    at::Tensor seen;
    torch::autograd::impl::set_post_acc_grad_hooks(
        weight, std::make_unique<PostHook>([&](const at::Tensor& p) { seen = dtensor(p.grad()).full_tensor(); }));
    twin.plain_loss().backward();
    twin.sharded_loss().backward();
    ASSERT_TRUE(seen.defined());
    EXPECT_LT(difference(seen, as_mlp(twin.plain()).layers[0]->weight.grad()), 1e-9);
  });
}

TEST_P(OffloadThreads, AFailedBackwardLeavesNothingBehind) {
  run_twins(ranks(), offloaded(mlp({12, 7, 12}, 2 * ranks())), Grouping::kChildren, [](Twin& twin, int) {
    twin.train_step();
    twin.sharded_loss();
    twin.model().reset_iter_state();
    twin.train_step();
    twin.expect_equal_parameters();
    // The second layer's gradients are on their way to the host already when the first's are looked at.
    auto first = fsdp_module(as_mlp(twin.net()).layers[0]);
    first.set_all_reduce_hook([](const at::Tensor&) { throw std::runtime_error("not these"); });
    const auto loss = twin.sharded_loss();
    EXPECT_THROW(loss.backward(), std::exception);
    twin.model().reset_iter_state();
    first.set_all_reduce_hook(nullptr);
    twin.train_step();
    twin.expect_equal_parameters();
  });
}

FSDP_ON_RANKS(OffloadThreads, 1, 2, 3);

TEST(OffloadHybridThreads, TrainsAndKeepsOverSomeRanks) {
  auto c = mlp({12, 7, 12}, 8);
  c.mesh_shape = {2, 2};
  expect_parity(4, offloaded(c));
  c.mesh_shape = {4};
  c.options.reshard_after_forward = int64_t{2};
  expect_parity(4, offloaded(c));
}

TEST(OffloadHybridThreads, IsNothingOnTheCpu) {
  auto c = mlp({12, 7, 12}, 4);
  c.options.offload_policy = CPUOffloadPolicy{.pin_memory = true};
  expect_parity(2, c);
}

TEST(OffloadRefusalThreads, BesideMemoryInCommon) {
  run_twins(2, offloaded(mlp({12, 12}, 4)), Grouping::kOne, [](Twin& twin, int) {
    try {
      twin.model().set_symm_mem_for_comm();
      ADD_FAILURE() << "not refused";
    } catch (const NotSupported& error) {
      EXPECT_NE(std::string(error.what()).find("an offload policy"), std::string::npos) << error.what();
    }
  });
}

}  // namespace
}  // namespace fsdp::testing
