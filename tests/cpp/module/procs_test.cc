// The core models on processes, over Gloo and over shared memory.
#include "nets.h"
#include "support/processes.h"

namespace fsdp::testing {
namespace {

void on_engine(const std::function<void()>& body) {
  init_process_group({.engine = process_arguments().at(0), .timeout = std::chrono::seconds(60)});
  body();
  barrier();
  destroy_process_group();
}

void both_groupings(const Case& c) {
  expect_parity_here(c, Grouping::kOne);
  expect_parity_here(c, Grouping::kChildren);
}

FSDP_PROCESS_BODY(parity_on_engine) {
  on_engine([] {
    both_groupings(mlp({8, 17, 5}, 2 * world_size()));
    both_groupings(wide_mlp(2 * world_size()));
    both_groupings(gpt_case(2 * world_size(), /*tied=*/false));
    both_groupings(gpt_case(world_size(), /*tied=*/true));
  });
}

// Ranks that use different parts of a model: gathers and reductions are agreed upon, on a wire that would not notice.
FSDP_PROCESS_BODY(uneven_use_on_engine) {
  on_engine([] { both_groupings(uneven_use_case(world_size())); });
}

FSDP_PROCESS_BODY(hybrid_on_engine) {
  on_engine([] {
    auto c = mlp({8, 17, 5}, 2 * world_size());
    c.mesh_shape = {2, world_size() / 2};
    both_groupings(c);
  });
}

struct ParityProcs : ::testing::TestWithParam<std::tuple<int, const char*>> {
  static void run(const std::string& body) {
    const auto& [ranks, engine] = GetParam();
    run_processes(ranks, body, {.arguments = {engine}});
  }
};

TEST_P(ParityProcs, MlpAndGpt) { run("parity_on_engine"); }
TEST_P(ParityProcs, UnevenUse) { run("uneven_use_on_engine"); }

INSTANTIATE_TEST_SUITE_P(Ranks, ParityProcs,
                         ::testing::Combine(::testing::Values(2, 3), ::testing::Values("gloo", "shm")));

struct HybridProcs : ::testing::TestWithParam<const char*> {};

TEST_P(HybridProcs, Mlp) { run_processes(4, "hybrid_on_engine", {.arguments = {GetParam()}}); }

INSTANTIATE_TEST_SUITE_P(Engines, HybridProcs, ::testing::Values("gloo", "shm"));

}  // namespace
}  // namespace fsdp::testing
