// State dicts of every shape, written into other models and optimizers, of both styles. Ranks are threads.
#include <functional>
#include <string>

#include <gtest/gtest.h>

#include <fsdp/fsdp.h>

#include "net.h"
#include "support/ranks.h"

namespace fsdp {
namespace {

using testing::expect_equal;
using testing::Net;
using testing::run_ranks;
using testing::train;

torch::optim::AdamW adamw(const Net& net, double rate = 0.01) {
  return torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(rate));
}

using Handle = FSDPModule<Net>;
struct Style {
  const char* name;
  std::function<Handle(Net)> shard;
};
const Style kRows{"rows", [](Net net) {
                    fully_shard(net->out);
                    return fully_shard(std::move(net));
                  }};
const Style kClassic{"classic", [](Net net) -> Handle {
                       const auto* out = net->out.get();  // as above: what is tied must be in one unit
                       return FullyShardedDataParallel(
                           std::move(net), {.auto_wrap_policy = [out](const torch::nn::Module& module, int64_t) {
                             return &module == out;
                           }});
                     }};

struct LoadStateDictThreads : ::testing::TestWithParam<int> {
  void each(const std::function<void(int rank, const Style& from, const Style& to)>& body) const {
    for (const auto* from : {&kRows, &kClassic}) {
      for (const auto* to : {&kRows, &kClassic}) {
        SCOPED_TRACE(std::string(from->name) + " to " + to->name);
        run_ranks(GetParam(), [&](int rank) { body(rank, *from, *to); });
      }
    }
  }
};

TEST_P(LoadStateDictThreads, AnyShapeIntoAnyModel) {
  each([&](int rank, const Style& from, const Style& to) {
    auto model = from.shard(Net(1));
    auto optimizer = adamw(model.module());
    train(model, optimizer, 0, 2, rank, GetParam());
    const auto expected = full_state_dict(model);
    const auto expect_loaded = [&](const StateDict& state, const Style& style) {
      auto other = style.shard(Net(2));
      const auto tensor = other->row;
      load_state_dict(other, state);
      EXPECT_TRUE(tensor.is_same(other->row));
      EXPECT_TRUE(is_dtensor(other->row));
      expect_equal(full_state_dict(other), expected);
      return other;
    };
    expect_loaded(expected, to);
    expect_loaded(state_dict(model), to);
    expect_loaded(local_state_dict(model), from);
    Net plain(2);
    load_state_dict(plain, state_dict(model));
    expect_equal(full_state_dict(plain), expected);
    load_state_dict(model, full_state_dict(Net(3)));
    expect_equal(full_state_dict(model), full_state_dict(Net(3)));
  });
}

TEST_P(LoadStateDictThreads, OptimizersGoOnAsTheyWould) {
  each([&](int rank, const Style& from, const Style& to) {
    auto model = from.shard(Net(1));
    auto optimizer = adamw(model.module(), 0.02);
    train(model, optimizer, 0, 2, rank, GetParam());
    const auto whole = full_optimizer_state_dict(model, optimizer), sharded = optimizer_state_dict(model, optimizer);
    EXPECT_EQ(whole.tensors["row.exp_avg"].sizes(), (std::vector<int64_t>{1, 17}));
    EXPECT_FALSE(is_dtensor(whole.tensors["row.exp_avg"]));
    const auto first = full_optimizer_state_dict(model, optimizer, {.rank0_only = true});
    EXPECT_EQ(first.tensors.size(), rank == 0 ? whole.tensors.size() : 0);
    auto resumed = to.shard(Net(2)), again = to.shard(Net(3));
    auto fresh = adamw(resumed.module(), 0.5), stepped = adamw(again.module(), 0.5);
    train(again, stepped, 7, 8, rank, GetParam());  // it has a state, which is replaced
    load_state_dict(resumed, state_dict(model));
    load_state_dict(again, state_dict(model));
    load_optimizer_state_dict(resumed, fresh, whole);
    load_optimizer_state_dict(again, stepped, sharded);
    train(model, optimizer, 2, 4, rank, GetParam());
    train(resumed, fresh, 2, 4, rank, GetParam());
    train(again, stepped, 2, 4, rank, GetParam());
    const auto expected = full_state_dict(model);
    expect_equal(full_state_dict(resumed), expected, from.name == to.name ? 0 : 1e-6);
    expect_equal(full_state_dict(again), expected, from.name == to.name ? 0 : 1e-6);
  });
}

TEST_P(LoadStateDictThreads, WhatTheFirstRankHas) {
  each([&](int rank, const Style& from, const Style& to) {
    auto model = from.shard(Net(1));
    auto optimizer = adamw(model.module(), 0.02);
    train(model, optimizer, 0, 2, rank, GetParam());
    const auto state = full_state_dict(model, {.rank0_only = true});
    const auto optimizer_state = full_optimizer_state_dict(model, optimizer, {.rank0_only = true});
    auto other = to.shard(Net(2));
    auto resumed = adamw(other.module(), 0.5);
    load_state_dict(other, state, {.from_rank0 = true});
    load_optimizer_state_dict(other, resumed, optimizer_state, {.from_rank0 = true});
    expect_equal(full_state_dict(other), full_state_dict(model));
    train(model, optimizer, 2, 4, rank, GetParam());
    train(other, resumed, 2, 4, rank, GetParam());
    expect_equal(full_state_dict(other), full_state_dict(model), from.name == to.name ? 0 : 1e-6);
    EXPECT_THROW(load_state_dict(other, state_dict(model), {.from_rank0 = true}), InvalidArgument);
    EXPECT_THROW(load_state_dict(other, StateDict(), {.from_rank0 = true}), CheckpointError);
  });
}

std::string refusal(const std::function<void()>& load) {
  try {
    load();
  } catch (const CheckpointError& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST_P(LoadStateDictThreads, WhatDoesNotFitChangesNothing) {
  run_ranks(GetParam(), [&](int rank) {
    auto model = kClassic.shard(Net(1));
    auto optimizer = adamw(model.module());
    train(model, optimizer, 0, 1, rank, GetParam());
    const auto before = full_state_dict(model);
    const auto expect = [&](const std::string& part, const std::function<void(StateDict&)>& change) {
      auto state = full_state_dict(Net(2));
      change(state);
      const auto message = refusal([&] { load_state_dict(model, state); });
      EXPECT_NE(message.find(part), std::string::npos) << message;
      expect_equal(full_state_dict(model), before);
    };
    expect("missing from it: 'row'", [](StateDict& state) { state.erase("row"); });
    expect("only in it: 'other'", [](StateDict& state) { state.insert("other", torch::ones({2})); });
    expect("'mean' is F32[5] here, F64[5] in it",
           [](StateDict& state) { state["mean"] = state["mean"].to(at::kDouble); });
    expect("'in.weight' and 'tied' are one tensor here, two in it",
           [](StateDict& state) { state["tied"] = state["tied"] + 1; });
    // On one rank alone: all are told.
    expect("missing from it", [&](StateDict& state) {
      if (rank == GetParam() - 1) state.clear();
    });
    torch::optim::SGD sgd(model->parameters(), 0.1);
    const auto state = full_optimizer_state_dict(model, optimizer);
    EXPECT_NE(refusal([&] { load_optimizer_state_dict(model, sgd, state); }).find("AdamW"), std::string::npos);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, LoadStateDictThreads, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace fsdp
