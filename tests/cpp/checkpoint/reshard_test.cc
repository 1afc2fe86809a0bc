// Checkpoints of sharded models, loaded on other numbers of ranks. Ranks are threads.
#include <cstring>
#include <mutex>

#include <gtest/gtest.h>

#include <fsdp/fsdp.h>

#include "net.h"
#include "support/ranks.h"
#include "temp_folder.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;
using testing::expect_equal;
using testing::message_of;
using testing::Net;
using testing::run_ranks;
using testing::TempFolder;
using testing::train;

torch::optim::AdamW adamw(const Net& net) {
  return torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(0.01));
}

/// `out` as a group of its own, and the rest.
FSDPModule<Net> sharded(Net net) {
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()}, {"dp"});
  fully_shard(net->out, {.mesh = mesh});
  return fully_shard(std::move(net), {.mesh = mesh});
}

/// What a plain run of 2 steps, saved, and 3 more gives.
struct Reference {
  StateDict saved, end;
  std::vector<double> losses;

  static const Reference& get() {
    static const Reference reference = [] {
      Reference r;
      Net net(1);
      auto optimizer = adamw(net);
      train(net, optimizer, 0, 2);
      r.saved = full_state_dict(net);
      r.losses = train(net, optimizer, 2, 5);
      r.end = full_state_dict(net);
      return r;
    }();
    return reference;
  }
};

// `calls` counts forwards and `mean` is not trained: equal on all ranks.
constexpr double kRounding = 2e-5;

void save_after_two_steps(const std::string& path, int ranks) {
  run_ranks(ranks, [&](int rank) {
    auto model = sharded(Net(1));
    auto optimizer = adamw(model.module());
    train(model, optimizer, 0, 2, rank, ranks);
    save(model, optimizer, path, {.step = 2});
  });
}

class ResumeThreads : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(ResumeThreads, ContinuesLikeThePlainRun) {
  const auto [saved_by, loaded_by] = GetParam();
  const auto& reference = Reference::get();
  const TempFolder folder;
  save_after_two_steps(folder / "ckpt", saved_by);

  std::vector<std::vector<double>> losses(loaded_by);
  run_ranks(loaded_by, [&, ranks = loaded_by](int rank) {
    auto model = sharded(Net(2));
    auto optimizer = adamw(model.module());
    EXPECT_EQ(load(model, optimizer, folder / "ckpt").step, 2);
    expect_equal(full_state_dict(model), reference.saved, kRounding);
    losses[rank] = train(model, optimizer, 2, 5, rank, ranks);
    expect_equal(full_state_dict(model), reference.end, kRounding);
  });
  for (size_t step = 0; step < reference.losses.size(); ++step) {
    double mean = 0;
    for (const auto& of_rank : losses) {
      mean += of_rank[step] / loaded_by;
    }
    EXPECT_NEAR(mean, reference.losses[step], kRounding);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ResumeThreads,
                         ::testing::Combine(::testing::Values(1, 2, 3, 6), ::testing::Values(1, 2, 3)));

// No training: what is loaded is what was saved, to the bit. 5 and 8 ranks have empty shards of every parameter.
TEST(ReshardBitsThreads, AnyNumberToAnyOther) {
  for (const int saved_by : {1, 2, 3, 5, 8}) {
    const TempFolder folder;
    run_ranks(saved_by, [&](int) { save(sharded(Net(1)), folder / "ckpt"); });
    for (const int loaded_by : {1, 2, 3, 5, 8}) {
      run_ranks(loaded_by, [&](int) {
        auto model = sharded(Net(2));
        EXPECT_EQ(load(model, folder / "ckpt").world_size, saved_by);
        expect_equal(full_state_dict(model), full_state_dict(Net(1)));
      });
    }
  }
}

TEST(ReshardThreads, PlainAndSharded) {
  const auto& reference = Reference::get();
  const TempFolder folder;
  save_after_two_steps(folder / "sharded", 3);
  Net plain(2);
  auto optimizer = adamw(plain);
  load(plain, optimizer, folder / "sharded");
  expect_equal(full_state_dict(plain), reference.saved, kRounding);
  train(plain, optimizer, 2, 5);
  expect_equal(full_state_dict(plain), reference.end, kRounding);

  Net again(1);
  auto again_optimizer = adamw(again);
  train(again, again_optimizer, 0, 2);
  save(again, again_optimizer, folder / "plain");
  run_ranks(2, [&](int rank) {
    auto model = sharded(Net(2));
    auto fresh = adamw(model.module());
    load(model, fresh, folder / "plain");
    expect_equal(full_state_dict(model), reference.saved);
    train(model, fresh, 2, 5, rank, 2);
    expect_equal(full_state_dict(model), reference.end, kRounding);
    // Plain replicas write each tensor once.
    Net replica(1);
    save(replica, folder / "replicas");
  });
  load(plain, folder / "replicas");
  expect_equal(full_state_dict(plain), full_state_dict(Net(1)));
}

TEST(ReshardThreads, TwoDimensionalMeshWritesEachRowOnce) {
  const TempFolder folder;
  run_ranks(4, [&](int) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
    auto model = fully_shard(Net(1), {.mesh = mesh});
    save(model, folder / "ckpt", {.rng = false});
  });
  EXPECT_LT(fs::file_size(folder / "ckpt/rank-00002-of-00004.safetensors"), 100u) << "a replica's file is empty";
  Net plain(2);
  load(plain, folder / "ckpt");
  expect_equal(full_state_dict(plain), full_state_dict(Net(1)));
}

// ---- errors: each on every rank

void expect_on_every_rank(int ranks, const std::string& expected, const std::function<void(int)>& body) {
  std::mutex mutex;
  std::vector<std::string> messages;
  run_ranks(ranks, [&](int rank) {
    const auto message = message_of<Error>([&] { body(rank); });
    const std::lock_guard<std::mutex> lock(mutex);
    messages.push_back(message);
  });
  for (const auto& message : messages) {
    EXPECT_NE(message.find(expected), std::string::npos) << "got: " << message << "\nexpected: " << expected;
    EXPECT_EQ(message, messages[0]);
  }
}

TEST(ReshardThreadsFault, DamageIsSeenByAll) {
  const TempFolder folder;
  save_after_two_steps(folder / "ckpt", 3);
  const auto load_it = [&](int) {
    auto model = sharded(Net(2));
    auto optimizer = adamw(model.module());
    const auto before = full_state_dict(model);
    try {
      load(model, optimizer, folder / "ckpt");
    } catch (...) {
      expect_equal(full_state_dict(model), before);
      throw;
    }
  };
  const std::string last = folder / "ckpt/rank-00002-of-00003.safetensors";
  const auto whole = testing::slurp(last);
  auto damaged = whole;
  damaged[20] ^= 1;
  testing::spill(last, damaged);
  expect_on_every_rank(2, "rank-00002-of-00003.safetensors", load_it);
  // A bit of the data, in a parameter's piece that other numbers of ranks read in part.
  uint64_t header = 0;
  std::memcpy(&header, whole.data(), sizeof header);
  damaged = whole;
  damaged[8 + header + 3] ^= 1;
  testing::spill(last, damaged);
  for (const int loaded_by : {1, 2, 3, 5}) expect_on_every_rank(loaded_by, "is damaged: its checksum is", load_it);
  testing::spill(last, whole.substr(0, whole.size() - 5));
  expect_on_every_rank(3, "it was cut off", load_it);
  fs::remove(last);
  expect_on_every_rank(2, "rank-00002-of-00003.safetensors", load_it);
}

TEST(ReshardThreadsFault, OneRankFailsToSave) {
  const TempFolder folder;
  expect_on_every_rank(3, "on rank 1: 'model.big' is of dtype", [&](int rank) {
    Net net(1);
    if (rank == 1) {
      net->register_buffer("big", torch::zeros({2}, torch::kComplexDouble));
    }
    save(net, folder / "ckpt");
  });
  expect_on_every_rank(2, "'model.extra' exists on 1 of 2 ranks", [&](int rank) {
    Net net(1);
    if (rank == 1) {
      net->register_buffer("extra", torch::zeros({2}));
    }
    save(net, folder / "ckpt");
  });
  testing::spill(folder / "file", "x");
  expect_on_every_rank(2, "is not a checkpoint", [&](int) { save(Net(1), folder / "file"); });
  EXPECT_FALSE(fs::exists(folder / "ckpt"));
}

TEST(ReshardThreadsFault, AnotherModelIsSeenByAll) {
  const TempFolder folder;
  save_after_two_steps(folder / "ckpt", 2);
  expect_on_every_rank(3, "of another model: missing from it: 'extra'", [&](int) {
    Net net(1);
    net->register_parameter("extra", torch::zeros({7, 2}));
    auto model = sharded(net);
    load(model, folder / "ckpt");
  });
}

/// A model that `other` cuts saves as rows, with its optimizer, and goes on like one that is cut by rows from the
/// checkpoint of either.
template <class Other>
void expect_same_as_rows(const Other& other, int saved_by, int loaded_by) {
  const auto expected = full_state_dict(Net(1));
  const TempFolder folder;
  run_ranks(saved_by, [&](int rank) {
    auto model = other(Net(1));
    auto optimizer = adamw(model.module());
    train(model, optimizer, 0, 1, rank, saved_by);
    save(model, optimizer, folder / "other", {.step = 1});
    save(sharded(Net(1)), folder / "rows");
  });
  run_ranks(loaded_by, [&](int rank) {
    auto rows = sharded(Net(2));
    auto cut = other(Net(2));
    load(cut, folder / "rows");
    expect_equal(full_state_dict(cut), expected);
    auto rows_adam = adamw(rows.module()), cut_adam = adamw(cut.module());
    load(rows, rows_adam, folder / "other");
    load(cut, cut_adam, folder / "other");
    expect_equal(full_state_dict(cut), full_state_dict(rows));
    train(rows, rows_adam, 1, 3, rank, loaded_by);
    train(cut, cut_adam, 1, 3, rank, loaded_by);
    expect_equal(full_state_dict(cut), full_state_dict(rows), kRounding);
  });
}

// A parameter that is cut along another dim is saved as rows all the same, so that any layout reads it.
TEST(ReshardBitsThreads, BetweenDims) {
  const auto by_columns = [](Net net) {
    FullyShardOptions options;
    options.mesh = init_device_mesh(torch::kCPU, {world_size()}, {"dp"});
    options.shard_placement_fn = [](const torch::Tensor& p) -> std::optional<Placement> {
      if (p.dim() == 2 && p.size(1) == 6) return Placement{Placement::Kind::kShard, 1};
      return std::nullopt;
    };
    return fully_shard(std::move(net), options);
  };
  for (const int saved_by : {1, 2, 3}) {
    for (const int loaded_by : {1, 2, 3}) expect_same_as_rows(by_columns, saved_by, loaded_by);
  }
}

// So is what the classic wrapper cuts by elements.
TEST(ReshardBitsThreads, BetweenStyles) {
  const auto wrapped = [](Net net, ShardingStrategy strategy) {
    FullyShardedDataParallelOptions options;
    options.sharding_strategy = strategy;
    options.auto_wrap_policy = [out = net->out](const torch::nn::Module& module, int64_t) {
      return out.get() == &module;
    };
    return FullyShardedDataParallel<Net>(std::move(net), options);
  };
  for (const auto strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kNoShard}) {
    for (const int saved_by : {1, 2, 3}) {
      for (const int loaded_by : {1, 3, 4}) {
        expect_same_as_rows([&](Net net) { return wrapped(std::move(net), strategy); }, saved_by, loaded_by);
      }
    }
  }
}

// The fused optimizers are torch::optim's to a checkpoint.
TEST(ReshardBitsThreads, FusedAndNot) {
  const TempFolder folder;
  run_ranks(2, [&](int rank) {
    auto model = sharded(Net(1));
    optim::AdamW fused(model->parameters(), torch::optim::AdamWOptions(0.01));
    train(model, fused, 0, 2, rank, 2);
    save(model, fused, folder / "ckpt", {.step = 2});
    auto other = sharded(Net(2));
    auto theirs = adamw(other.module());
    load(other, theirs, folder / "ckpt");
    train(other, theirs, 2, 4, rank, 2);
    auto again = sharded(Net(3));
    optim::AdamW resumed(again->parameters(), torch::optim::AdamWOptions(0.01));
    load(again, resumed, folder / "ckpt");
    train(again, resumed, 2, 4, rank, 2);
    expect_equal(full_state_dict(again), full_state_dict(other), kRounding);
  });
}

}  // namespace
}  // namespace fsdp
