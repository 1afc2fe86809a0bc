// A user's own collectives for a group, and the hook on reduced gradients.
#include <fsdp/custom_comm.h>

#include "mesh/mesh_state.h"
#include "nets.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

using Calls = std::vector<std::vector<int64_t>>;  // lengths of output and input

/// A wire of the test's own, that the engine knows nothing of.
std::shared_ptr<comm::Channel> own_channel() {
  return init_device_mesh(at::kCPU, {world_size()}, {"own"}).state()->axis_channel(0, mesh::Lane::kGather);
}

struct Gather : CustomAllGather {
  WaitFn run(const at::Tensor& output, const at::Tensor& input) override {
    calls.push_back({output.numel(), input.numel()});
    dtype = input.scalar_type();
    std::shared_ptr<comm::Pending> pending = channel->all_gather_even(output, input);
    return [pending, this] {
      pending->wait();
      ++waits;
    };
  }
  std::shared_ptr<comm::Channel> channel = own_channel();
  Calls calls;
  at::ScalarType dtype = at::kByte;
  int waits = 0;
};

struct Reduce : CustomReduceScatter {
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    auto& kept = buffers[numel];  // persistent memory, as a pool would give
    if (!kept.defined()) kept = at::empty({numel}, options);
    return kept;
  }
  WaitFn run(const at::Tensor& output, const at::Tensor& input) override {
    calls.push_back({output.numel(), input.numel()});
    auto sum = input.clone();
    channel->all_reduce(sum, comm::ReduceOp::kSum)->wait();
    output.copy_(sum.narrow(0, channel->rank() * output.numel(), output.numel()));
    return {};  // done
  }
  std::shared_ptr<comm::Channel> channel = own_channel();
  Calls calls;
  std::map<int64_t, at::Tensor> buffers;
};

struct CustomThreads : OnRanks {};

TEST_P(CustomThreads, TrainsWithItsOwnCollectives) {
  run_twins(ranks(), mlp({6, 17, 9, 4}, 2 * ranks()), Grouping::kChildren, [&](Twin& twin, int) {
    const auto gather = std::make_shared<Gather>();
    const auto reduce = std::make_shared<Reduce>();
    auto group = layer_group(twin.net(), 1);  // read in backward too, unlike the first
    group.set_custom_all_gather(gather);
    group.set_custom_reduce_scatter(reduce);
    for (int step = 0; step < 3; ++step) twin.train_step();
    twin.expect_equal_parameters();
    // Rows of the layer's {9, 17} weight and {9} bias: rank 0 has the most.
    const int64_t longest = (9 + ranks() - 1) / ranks() * 18;
    EXPECT_EQ(gather->calls, Calls(6, {ranks() * longest, longest}));
    EXPECT_EQ(gather->waits, 6);
    EXPECT_EQ(gather->dtype, at::kDouble);
    EXPECT_EQ(reduce->calls, ranks() == 1 ? Calls() : Calls(3, {longest, ranks() * longest}));

    group.set_custom_all_gather(nullptr);
    group.set_custom_reduce_scatter(nullptr);
    twin.train_step();
    twin.expect_equal_parameters();
    EXPECT_EQ(gather->calls.size(), 6u);
  });
}

TEST_P(CustomThreads, TheHookSeesAveragesAndMayChangeThem) {
  auto c = mlp({6, 17, 4}, 2 * ranks());
  run_twins(ranks(), c, Grouping::kOne, [&](Twin& twin, int) {
    int calls = 0;
    twin.model().set_all_reduce_hook([&](const at::Tensor& flat) {
      ++calls;
      flat.mul_(3);
    });
    (twin.plain_loss() * 3).backward();
    twin.sharded_loss().backward();
    twin.expect_equal_gradients();
    EXPECT_EQ(calls, 1);
  });
}

FSDP_ON_RANKS(CustomThreads, 1, 2, 3, 5);

TEST(CustomHybridThreads, TheHookComesAfterTheReplicas) {
  auto c = mlp({6, 17, 4}, 8);
  c.mesh_shape = {2, 2};
  run_twins(4, c, Grouping::kOne, [&](Twin& twin, int) {
    int calls = 0;
    twin.model().set_all_reduce_hook([&](const at::Tensor& flat) {
      ++calls;
      flat.neg_();
    });
    twin.model().set_requires_all_reduce(false);
    twin.sharded_loss().backward();
    EXPECT_EQ(calls, 0);
    twin.model().set_requires_all_reduce(true);
    twin.sharded_loss().backward();
    EXPECT_EQ(calls, 1);
    (twin.plain_loss() * -2).backward();
    twin.expect_equal_gradients();
  });
}

TEST(CustomRefusalThreads, BuffersOfTheWrongKind) {
  struct Wrong : Gather {
    at::Tensor allocate(int64_t numel, const at::TensorOptions&) override { return at::empty({numel}, at::kInt); }
  };
  run_twins(2, mlp({6, 17, 4}, 2), Grouping::kOne, [](Twin& twin, int) {
    twin.model().set_custom_all_gather(std::make_shared<Wrong>());
    try {
      twin.sharded_loss();
      ADD_FAILURE() << "taken";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("custom all-gather allocated"), std::string::npos) << error.what();
    }
    twin.model().set_custom_all_gather(nullptr);
    twin.model().reset_iter_state();
    twin.train_step();
    twin.expect_equal_parameters();
  });
}

TEST(CustomRefusalThreads, BesideANumberForReshard) {
  run_ranks(4, [](int) {
    auto model = fully_shard(torch::nn::Linear(8, 8), {.reshard_after_forward = 2});
    EXPECT_THROW(model.set_custom_all_gather(std::make_shared<Gather>()), NotSupported);
  });
}

// Only one rank sets it: the next step says so, on both.
TEST(CustomRefusalThreads, OnOneRankOnly) {
  run_ranks(2, [](int rank) {
    auto model = fully_shard(torch::nn::Linear(8, 8));
    const auto gather = std::make_shared<Gather>();
    if (rank == 0) model.set_custom_all_gather(gather);
    EXPECT_THROW(model(at::ones({1, 8})), CommError);
  });
}

}  // namespace
}  // namespace fsdp::testing
