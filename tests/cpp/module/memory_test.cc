// What an iteration sends, in which order, and how many bytes it keeps.
#include <mutex>
#include <sstream>

#include "nets.h"

namespace fsdp::testing {
namespace {

using engine::Phase;

constexpr int64_t kWidth = 24;

/// y = (((x * scale) block0) block1 ...) * shift: the root's own parameters are used first and last.
struct StackNet : Net {
  explicit StackNet(int blocks) : scale(register_parameter("scale", torch::rand({kWidth}) + 0.5)) {
    shift = register_parameter("shift", torch::rand({kWidth}) + 0.5);
    for (int i = 0; i < blocks; ++i) {
      layers.push_back(register_module("block" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
    }
  }
  at::Tensor forward(const at::Tensor& x) override {
    auto y = x * scale;
    for (auto& layer : layers) {
      y = at::tanh(layer(y));
      after_block();
    }
    return y * shift;
  }
  at::Tensor scale, shift;
  std::vector<torch::nn::Linear> layers;
  std::function<void()> after_block = [] {};
};

StackNet& stack(Twin& twin) { return dynamic_cast<StackNet&>(twin.net()); }

Case stack_case(int blocks, int ranks) {
  Case c;
  c.make = [blocks] { return std::make_shared<StackNet>(blocks); };
  c.batch = ramp({2 * ranks, kWidth});
  return c;
}

std::vector<std::string> groups_of(const std::vector<engine::Event>& events, Phase phase, const std::string& act) {
  std::vector<std::string> groups;
  for (const auto& event : events) {
    if (event.phase == phase && event.act == act) groups.push_back(event.group);
  }
  return groups;
}

std::vector<std::string> blocks_down_from(int count) {
  std::vector<std::string> names;
  for (int i = count; i-- > 0;) names.push_back("block" + std::to_string(i));
  return names;
}

// What large groups gather into is kept for the next one, and no more of it than was in use.
TEST(MemoryThreads, LargeGroupsTakeTurnsInTheirMemory) {
  run_twins(2, wide_mlp(4), Grouping::kChildren, [&](Twin& twin, int) {
    const auto& memory = twin.context().leaf_memory();
    EXPECT_EQ(memory.kept_bytes(), 0);
    twin.train_step();
    const auto kept = memory.kept_bytes();
    EXPECT_GT(kept, 0);
    EXPECT_LE(kept, twin.context().stats().unsharded_params.peak + 3 * 4096);
    for (int step = 0; step < 3; ++step) twin.train_step();
    EXPECT_EQ(memory.kept_bytes(), kept);
    twin.expect_equal_parameters();
    twin.model().set_reshard_after_forward(false);
    twin.sharded_loss();
    EXPECT_LT(memory.kept_bytes(), kept);  // in use
  });
}

struct ScheduleThreads : OnRanks {};

TEST_P(ScheduleThreads, SteadyIterationSendsWhatItsOrderSays) {
  for (int blocks : {1, 2, 5}) {
    std::mutex mutex;
    std::vector<std::string> schedules;
    run_twins(ranks(), stack_case(blocks, ranks()), Grouping::kChildren, [&](Twin& twin, int) {
      auto& context = twin.context();
      for (int step = 0; step < 4; ++step) {
        const auto before = context.stats();
        twin.train_step();
        // From the first iteration on: recording asks before each, and sends no more than following does.
        EXPECT_EQ(context.stats().gathers - before.gathers, 2 * blocks + 1) << "step " << step;
        EXPECT_EQ(context.stats().reduces - before.reduces, blocks + 1) << "step " << step;
        if (step >= 1) {
          EXPECT_EQ(context.stats().agreements - before.agreements, 3);
        }
        auto forward = blocks_down_from(blocks);
        forward.push_back("(root)");
        std::reverse(forward.begin(), forward.end());
        EXPECT_EQ(groups_of(context.events(), Phase::kForward, "all-gather"), forward);
        EXPECT_EQ(groups_of(context.events(), Phase::kForward, "reduce-scatter"), std::vector<std::string>{});
        // The root stays whole from forward to backward.
        EXPECT_EQ(groups_of(context.events(), Phase::kBackward, "all-gather"), blocks_down_from(blocks));
        auto reduces = blocks_down_from(blocks);
        reduces.push_back("(root)");
        EXPECT_EQ(groups_of(context.events(), Phase::kBackward, "reduce-scatter"), reduces);
      }
      const std::lock_guard lock(mutex);
      schedules.push_back(twin.model().schedule());
    });
    ASSERT_EQ(static_cast<int>(schedules.size()), ranks());
    for (const auto& schedule : schedules) EXPECT_EQ(schedule, schedules[0]);
    EXPECT_EQ(std::count(schedules[0].begin(), schedules[0].end(), '\n'), 3 * blocks + 2);
    EXPECT_NE(schedules[0].find("forward  all-gather      block0  "), std::string::npos) << schedules[0];
  }
}

TEST_P(ScheduleThreads, ReshardAfterForward) {
  constexpr int kBlocks = 3;
  auto c = stack_case(kBlocks, ranks());
  c.options.reshard_after_forward = false;
  run_twins(ranks(), c, Grouping::kChildren, [](Twin& twin, int) {
    for (int step = 0; step < 3; ++step) {
      const auto gathers = twin.context().stats().gathers;
      twin.train_step();
      EXPECT_EQ(twin.context().stats().gathers - gathers, kBlocks + 1);
    }
    // From now on backward gathers again, all but the blocks that keep theirs.
    twin.model().set_reshard_after_forward(true);
    fsdp_module(stack(twin).layers[1]).set_reshard_after_forward(false);
    for (int step = 0; step < 3; ++step) {
      twin.train_step();
      EXPECT_EQ(groups_of(twin.context().events(), Phase::kBackward, "all-gather").size(), 3u);  // root, 2, 0
    }
    twin.expect_equal_parameters();
  });
}

TEST_P(ScheduleThreads, EvalGathersOnceAndReducesNothing) {
  run_twins(ranks(), stack_case(3, ranks()), Grouping::kChildren, [](Twin& twin, int) {
    for (int step = 0; step < 3; ++step) {
      twin.train_step();
      at::NoGradGuard no_grad;
      const auto before = twin.context().stats();
      twin.sharded_loss();
      EXPECT_EQ(twin.context().stats().gathers - before.gathers, 4);
      EXPECT_EQ(twin.context().stats().reduces, before.reduces);
    }
  });
}

/// Gathers issued in this forward when each block has run.
std::vector<int64_t> gathers_after_blocks(Twin& twin) {
  std::vector<int64_t> counts;
  const auto before = twin.context().stats().gathers;
  stack(twin).after_block = [&] { counts.push_back(twin.context().stats().gathers - before); };
  twin.train_step();
  stack(twin).after_block = [] {};
  return counts;
}

TEST_P(ScheduleThreads, OneGroupIsGatheredAhead) {
  run_twins(ranks(), stack_case(4, ranks()), Grouping::kChildren, [](Twin& twin, int) {
    EXPECT_EQ(gathers_after_blocks(twin), (std::vector<int64_t>{2, 3, 4, 5}));  // recording: nothing is known yet
    EXPECT_EQ(gathers_after_blocks(twin), (std::vector<int64_t>{3, 4, 5, 5}));
    EXPECT_EQ(gathers_after_blocks(twin), (std::vector<int64_t>{3, 4, 5, 5}));
  });
}

TEST_P(ScheduleThreads, PrefetchListsAreFollowed) {
  run_twins(ranks(), stack_case(4, ranks()), Grouping::kChildren, [](Twin& twin, int) {
    auto& layers = stack(twin).layers;
    const auto group = [&](size_t i) { return fsdp_module(layers[i]); };
    group(0).set_modules_to_forward_prefetch({group(1), group(2), group(3)});
    group(3).set_modules_to_backward_prefetch({group(2), group(1), group(0)});
    group(1).set_modules_to_forward_prefetch({});
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(gathers_after_blocks(twin), (std::vector<int64_t>{5, 5, 5, 5})) << "step " << step;
      const auto& events = twin.context().events();
      std::vector<std::string> backward;
      for (const auto& event : events) {
        if (event.phase == Phase::kBackward) backward.push_back(event.group + (event.act[0] == 'a' ? " g" : " r"));
      }
      // All three are on their way before the first reduction.
      EXPECT_EQ(std::vector<std::string>(backward.begin(), backward.begin() + 5),
                (std::vector<std::string>{"block3 g", "block2 g", "block1 g", "block0 g", "block3 r"}));
    }
    // An empty list: nothing is gathered ahead.
    for (size_t i = 0; i < 4; ++i) group(i).set_modules_to_forward_prefetch({});
    twin.model().set_modules_to_forward_prefetch({});
    for (int step = 0; step < 2; ++step) {
      EXPECT_EQ(gathers_after_blocks(twin), (std::vector<int64_t>{2, 3, 4, 5}));
    }
    twin.expect_equal_parameters();
  });
}

// An iteration that needs a group that the record does not have, with the ranks' own collectives in between.
TEST_P(ScheduleThreads, RecordIsMadeAnewWhenItDoesNotFit) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        for (const char* name : {"a", "b", "c"}) net.add(name, torch::nn::Linear(6, 6));
      },
      [](FunctionNet& net, const at::Tensor& x) {
        const auto layer = [&](const char* name, const at::Tensor& y) {
          return at::tanh(net.module<torch::nn::LinearImpl>(name).forward(y));
        };
        auto y = layer("a", x);
        if (x.abs().max().item<double>() > 10) y = layer("b", y);
        return layer("c", y);
      });
  c.batch = ramp({2 * ranks(), 6});
  run_twins(ranks(), c, Grouping::kChildren, [](Twin& twin, int) {
    const auto& batch = twin.the_case().batch;
    auto large = batch.clone();
    large.select(1, 0).fill_(20);
    for (int step = 0; step < 2; ++step) twin.train_step(batch);
    for (int step = 0; step < 3; ++step) twin.train_step(large);
    for (int step = 0; step < 2; ++step) twin.train_step(batch);
    for (int step = 0; step < 2; ++step) twin.train_step(large);
    twin.expect_equal_parameters();
    EXPECT_EQ(groups_of(twin.context().events(), Phase::kForward, "all-gather"),
              (std::vector<std::string>{"a", "b", "c"}));
  });
}

FSDP_ON_RANKS(ScheduleThreads, 1, 2, 3, 5);

struct MemoryThreads : OnRanks {};

TEST_P(MemoryThreads, TwoGroupsAndTheRootAreWhole) {
  constexpr int kBlocks = 6;
  constexpr int64_t kBlockBytes = (kWidth * kWidth + kWidth) * 8, kRootBytes = 2 * kWidth * 8;
  run_twins(ranks(), stack_case(kBlocks, ranks()), Grouping::kChildren, [&](Twin& twin, int) {
    auto& stats = twin.context().stats();
    for (int step = 0; step < 4; ++step) {
      stats.unsharded_params.peak = stats.unsharded_params.now;
      stats.unsharded_gradients.peak = stats.unsharded_gradients.now;
      twin.train_step();
      EXPECT_LE(stats.unsharded_params.peak, kRootBytes + 2 * kBlockBytes) << "step " << step;
      EXPECT_GE(stats.unsharded_params.peak, kRootBytes + kBlockBytes);
      EXPECT_LE(stats.unsharded_gradients.peak, kRootBytes + 2 * kBlockBytes) << "step " << step;
      EXPECT_GE(stats.unsharded_gradients.peak, kRootBytes + kBlockBytes);
      EXPECT_EQ(stats.unsharded_params.now, 0);
      EXPECT_EQ(stats.unsharded_gradients.now, 0);
    }
  });
}

TEST_P(MemoryThreads, AsManyReductionsAsAllowedAreInFlight) {
  constexpr int kBlocks = 6;
  constexpr int64_t kBlockBytes = (kWidth * kWidth + kWidth) * 8;
  run_twins(ranks(), stack_case(kBlocks, ranks()), Grouping::kChildren, [&](Twin& twin, int) {
    auto& stats = twin.context().stats();
    EXPECT_THROW(twin.model().set_reduce_scatter_max_input_buffers(0), InvalidArgument);
    twin.train_step();
    for (const int64_t allowed : {1, 2, 4}) {
      twin.model().set_reduce_scatter_max_input_buffers(allowed);
      stats.unsharded_gradients.peak = stats.unsharded_gradients.now;
      twin.train_step();
      // Beside them, the gradients of the block that is next and of the root, which come bit by bit.
      EXPECT_GE(stats.unsharded_gradients.peak, (allowed + 1) * kBlockBytes) << allowed;
      EXPECT_LT(stats.unsharded_gradients.peak, (allowed + 2) * kBlockBytes) << allowed;
    }
    twin.expect_equal_parameters();
  });
}

TEST_P(MemoryThreads, NothingStaysAfterEval) {
  run_twins(ranks(), stack_case(3, ranks()), Grouping::kChildren, [](Twin& twin, int) {
    at::NoGradGuard no_grad;
    for (int i = 0; i < 3; ++i) {
      twin.sharded_loss();
      // The root alone keeps its parameters.
      EXPECT_LE(twin.context().stats().unsharded_params.now, 2 * kWidth * 8);
      twin.model().reshard();
      EXPECT_EQ(twin.context().stats().unsharded_params.now, 0);
    }
  });
}

// Nothing is padded: the ranks' shards add up to the parameters, and where rows divide evenly each has its part.
TEST_P(MemoryThreads, ShardsAddUpToTheParameters) {
  run_twins(ranks(), mlp({7, 30, 17, 1}, ranks()), Grouping::kChildren, [&](Twin& twin, int) {
    int64_t total = 0;
    for (const auto& parameter : twin.plain().parameters()) total += parameter.nbytes();
    int64_t here = 0;
    for (const auto* group : twin.context().groups()) here += group->sharded_bytes();
    int64_t locals = 0;
    for (const auto& parameter : twin.net().parameters()) locals += dtensor(parameter).to_local().nbytes();
    EXPECT_EQ(here, locals);
    const auto mean = all_reduce_mean(torch::tensor({static_cast<double>(here)}, at::kDouble)).item<double>();
    EXPECT_DOUBLE_EQ(mean * ranks(), static_cast<double>(total));
    const auto& even = as_mlp(twin.net()).layers[0];  // 30 rows on 1, 2, 3, 5
    EXPECT_EQ(dtensor(even->weight).to_local().numel() * ranks(), even->weight.numel());
  });
}

FSDP_ON_RANKS(MemoryThreads, 1, 2, 3, 5);

}  // namespace
}  // namespace fsdp::testing
