// The core models on processes, over Gloo.
#include "nets.h"
#include "support/processes.h"

namespace fsdp::testing {
namespace {

void on_gloo(const std::function<void()>& body) {
  init_process_group({.engine = "gloo", .timeout = std::chrono::seconds(60)});
  body();
  barrier();
  destroy_process_group();
}

void both_groupings(const Case& c) {
  expect_parity_here(c, Grouping::kOne);
  expect_parity_here(c, Grouping::kChildren);
}

FSDP_PROCESS_BODY(parity_over_gloo) {
  on_gloo([] {
    both_groupings(mlp({8, 17, 5}, 2 * world_size()));
    both_groupings(gpt_case(2 * world_size(), /*tied=*/false));
    both_groupings(gpt_case(world_size(), /*tied=*/true));
  });
}

// Ranks that use different parts of a model: gathers and reductions are agreed upon, on a wire that would not notice.
FSDP_PROCESS_BODY(uneven_use_over_gloo) {
  on_gloo([] {
    Case c;
    c.make = function_net(
        [](FunctionNet& net) {
          for (const char* name : {"a", "b", "c"}) net.add(name, torch::nn::Linear(4, 4));
        },
        [](FunctionNet& net, const at::Tensor& x) {
          auto y = at::tanh(net.module<torch::nn::LinearImpl>("a").forward(x));
          const auto* way = x[0][0].item<double>() > 0 ? "b" : "c";
          return net.module<torch::nn::LinearImpl>(way).forward(y);
        });
    c.apart = true;
    c.batch = ramp({2 * world_size(), 4});
    for (int r = 0; r < world_size(); ++r) c.batch[2 * r][0] = r == 0 ? 1.0 : -1.0;
    both_groupings(c);
  });
}

FSDP_PROCESS_BODY(hybrid_over_gloo) {
  on_gloo([] {
    auto c = mlp({8, 17, 5}, 2 * world_size());
    c.mesh_shape = {2, world_size() / 2};
    both_groupings(c);
  });
}

struct ParityProcs : ::testing::TestWithParam<int> {};

TEST_P(ParityProcs, MlpAndGpt) { run_processes(GetParam(), "parity_over_gloo"); }
TEST_P(ParityProcs, UnevenUse) { run_processes(GetParam(), "uneven_use_over_gloo"); }

INSTANTIATE_TEST_SUITE_P(Ranks, ParityProcs, ::testing::Values(2, 3));

TEST(HybridProcs, Mlp) { run_processes(4, "hybrid_over_gloo"); }

}  // namespace
}  // namespace fsdp::testing
