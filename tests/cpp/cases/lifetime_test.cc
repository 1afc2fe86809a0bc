// What a model holds goes with its last parameter: groups, meshes, and the channels whose peers would wait.
#include "cases.h"
#include "engine/context.h"
#include "module/module_state.h"

namespace fsdp::testing {
namespace {

TEST(LifetimeThreads, GroupsGoWithTheLastParameter) {
  run_ranks(2, [](int) {
    std::weak_ptr<module::ModuleState> state;
    std::weak_ptr<mesh::MeshState> mesh;
    at::Tensor kept;
    {
      Stack net;
      auto model = shard_blocks(net, {});
      for (int step = 0; step < 2; ++step) model(at::ones({2, 6})).sum().backward();
      state = model.state();
      mesh = model.state()->options().mesh.state();
      kept = net->head->weight;
    }
    EXPECT_FALSE(state.expired());
    EXPECT_EQ(whole(kept).sizes(), (std::vector<int64_t>{2, 6}));
    kept.reset();
    EXPECT_TRUE(state.expired());
    EXPECT_TRUE(mesh.expired());
  });
}

// A model too large for one rank is sharded while it is made: of each block this rank's rows alone stay.
TEST(LifetimeThreads, AModelIsShardedBlockByBlockAsItIsMade) {
  run_ranks(2, [](int) {
    torch::nn::Sequential net;
    for (int i = 0; i < 3; ++i) {
      auto block = ones_linear(4, 4);
      const auto before = block->weight.storage().getWeakStorageImpl();
      fully_shard(block);
      EXPECT_TRUE(before.expired()) << "block " << i << " is still whole";
      net->push_back(block);
    }
    auto model = fully_shard(net);
    const auto y = model(at::ones({1, 4}));
    EXPECT_EQ(y.sum().item<double>(), 4 * 64);
    y.sum().backward();
    for (const auto& parameter : net->parameters()) {
      EXPECT_TRUE(at::equal(whole(parameter.grad()), at::full({4, 4}, 16.0)));
    }
  });
}

// A loss keeps the graph, and the graph keeps leaves: reading it after its model went is an error, not a crash.
TEST(LifetimeThreads, BackwardWithoutTheModel) {
  const auto errors = errors_of(2, [](int) {
    at::Tensor loss;
    {
      Stack net;
      auto model = shard_blocks(net, {});
      loss = model(at::ones({2, 6})).sum();
    }
    loss.backward();
  });
  expect_every_rank_says(errors, {"libfsdp", "gone"});
}

}  // namespace
}  // namespace fsdp::testing
