// The classic wrapper: every strategy against the unsharded model, and what its methods promise.
#include <algorithm>
#include <cmath>
#include <mutex>
#include <set>

#include "../../../examples/gpt/gpt_model.h"
#include "classic.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

struct ClassicThreads : OnRanks {};

TEST_P(ClassicThreads, FullShard) { expect_parity(ranks(), classic(uneven(ranks()))); }

TEST_P(ClassicThreads, ShardGradOp) {
  expect_parity(ranks(), classic(uneven(ranks()), with(ShardingStrategy::kShardGradOp)));
}

TEST_P(ClassicThreads, NoShard) { expect_parity(ranks(), classic(uneven(ranks()), with(ShardingStrategy::kNoShard))); }

/// Wrapped on a mesh of its own, of so many replicas.
Case hybrid(int ranks, ShardingStrategy strategy, int64_t replicas) {
  auto c = uneven(ranks);
  c.wrap = [=](const NetPtr& net, Grouping grouping) -> Handle {
    auto options = with(strategy);
    options.mesh = init_device_mesh(at::kCPU, {replicas, world_size() / replicas}, {"replicate", "shard"});
    return classic({}, options).wrap(net, grouping);
  };
  return c;
}

TEST_P(ClassicThreads, Hybrid) {
  for (auto strategy : {ShardingStrategy::kHybridShard, ShardingStrategy::kHybridShardZero2}) {
    for (int64_t replicas = 1; replicas <= ranks(); ++replicas) {
      if (ranks() % replicas == 0) expect_parity(ranks(), hybrid(ranks(), strategy, replicas));
    }
  }
}

// cases.md, row 11.
TEST_P(ClassicThreads, ReplicasOfOneShardAverage) {
  run_ranks(ranks(), [](int rank) {
    auto options = with(ShardingStrategy::kHybridShard);
    options.mesh = init_device_mesh(at::kCPU, {world_size(), 1}, {"replicate", "shard"});
    Linear net(torch::nn::LinearOptions(1, 2).bias(false));
    wrapped(net, options)(torch::full({1, 1}, rank + 1.0)).sum().backward();
    EXPECT_TRUE(dtensor(net->weight.grad()).to_local().eq((world_size() + 1) / 2.0).all().item<bool>());
  });
}

// cases.md, row 15.
TEST_P(ClassicThreads, ScalarParameter) {
  struct Scaled : torch::nn::Module {
    at::Tensor weight = register_parameter("weight", torch::ones(4));
    at::Tensor scale = register_parameter("scale", torch::full({}, 2.0));
    at::Tensor forward(const at::Tensor& x) { return x * scale * weight; }
  };
  run_ranks(ranks(), [](int) {
    const auto net = std::make_shared<Scaled>();
    wrapped(net)(torch::ones(4)).sum().backward();
    EXPECT_EQ(dtensor(net->scale.grad()).full_tensor().item<double>(), 4);
    EXPECT_TRUE(dtensor(net->weight.grad()).full_tensor().eq(2).all().item<bool>());
  });
}

TEST_P(ClassicThreads, TiedEmbedding) {
  auto c = gpt_case(ranks(), /*tied=*/true);
  c.wrap = [](const NetPtr& net, Grouping grouping) -> Handle {
    Options options;
    if (grouping == Grouping::kChildren) options.auto_wrap_policy = module_wrap_policy<gpt::Block>();
    auto model = wrapped(net, options);
    EXPECT_EQ(model.state()->context().groups().size(), grouping == Grouping::kChildren ? 3u : 1u);
    return model;
  };
  expect_parity(ranks(), c);
}

// Scalars, no elements, shapes of many dims; one frozen, one that the loss does not depend on.
TEST_P(ClassicThreads, ShapesFrozenAndUnused) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        net.add("scale", torch::full({}, 1.5, at::kDouble));
        net.add("empty", torch::zeros({0, 3}, at::kDouble));
        net.add("cube", ramp({3, 2, 5}));
        net.add("frozen", ramp({5, 5}), /*requires_grad=*/false);
        net.add("unused", ramp({4}));
        net.add("bias", ramp({5}));
      },
      [](FunctionNet& net, const at::Tensor& x) {
        const auto y = at::einsum("bi,jki->bi", {x, net.at("cube")}) * net.at("scale");
        return y.matmul(net.at("frozen")) + net.at("bias") + net.at("empty").sum();
      });
  c.batch = ramp({2 * ranks(), 5});
  expect_parity(ranks(), classic(c), Grouping::kOne);
}

TEST_P(ClassicThreads, ConvWithBuffers) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        net.add("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 7, 3).padding(1)));
        net.add("norm", torch::nn::BatchNorm2d(7));
        net.add("head", Linear(7, 4));
      },
      [](FunctionNet& net, const at::Tensor& x) {
        auto y = net.module<torch::nn::Conv2dImpl>("conv").forward(x);
        y = at::relu(net.module<torch::nn::BatchNorm2dImpl>("norm").forward(y));
        return net.module<torch::nn::LinearImpl>("head").forward(y.mean({2, 3}));
      });
  c.batch = ramp({4, 3, 6, 6});
  c.same_data = true;
  expect_parity(ranks(), classic(c));
}

TEST_P(ClassicThreads, WithoutBackwardPrefetch) {
  Options options;
  options.backward_prefetch = std::nullopt;
  run_twins(ranks(), classic(uneven(ranks()), options), Grouping::kChildren, [](Twin& twin, int) {
    for (int step = 0; step < 3; ++step) twin.train_step();
    twin.expect_equal_parameters();
    for (const auto* group : twin.context().groups()) EXPECT_TRUE(group->place.explicit_backward_prefetch);
  });
}

// The bytes that a strategy promises: when units are whole, and how often they are gathered in a step.
TEST_P(ClassicThreads, WhatStrategiesKeep) {
  const auto check = [&](ShardingStrategy strategy, const Case& c, int64_t parts, int64_t gathers) {
    run_twins(ranks(), c, Grouping::kChildren, [&](Twin& twin, int) {
      twin.train_step();
      int64_t held = 0, total = 0;
      for (const auto* group : twin.context().groups()) {
        held += group->sharded_bytes();
        total += group->unsharded_bytes();
      }
      const auto joined = all_reduce_mean(torch::full({1}, static_cast<double>(held), at::kDouble)).item<double>();
      EXPECT_DOUBLE_EQ(joined * static_cast<double>(parts), static_cast<double>(total));
      auto& stats = twin.context().stats();
      const auto before = stats.gathers;
      const auto loss = twin.sharded_loss();
      const bool frees = strategy == ShardingStrategy::kFullShard || strategy == ShardingStrategy::kHybridShard;
      EXPECT_EQ(stats.unsharded_params.now, frees ? 0 : total);
      loss.backward();
      EXPECT_EQ(stats.unsharded_gradients.now, 0);
      EXPECT_EQ(stats.unsharded_params.now, 0);
      EXPECT_EQ(stats.gathers - before, gathers);
    });
  };
  // Two layers (the backward of the first reads no parameters) and the root, which has none of its own.
  const auto flat = [&](ShardingStrategy strategy) { return classic(uneven(ranks()), with(strategy)); };
  check(ShardingStrategy::kFullShard, flat(ShardingStrategy::kFullShard), ranks(), 3);
  check(ShardingStrategy::kShardGradOp, flat(ShardingStrategy::kShardGradOp), ranks(), 2);
  check(ShardingStrategy::kNoShard, flat(ShardingStrategy::kNoShard), 1, 2);
  if (ranks() % 2 != 0) return;
  for (auto [strategy, gathers] :
       {std::pair{ShardingStrategy::kHybridShard, 3}, {ShardingStrategy::kHybridShardZero2, 2}}) {
    check(strategy, hybrid(ranks(), strategy, 2), ranks() / 2, gathers);
  }
}

/// This rank's elements of one line.
at::Tensor chunk_here(const at::Tensor& line) {
  const int64_t chunk = (line.numel() + world_size() - 1) / world_size();
  const auto begin = std::min(line.numel(), chunk * rank());
  return line.narrow(0, begin, std::min(line.numel() - begin, chunk));
}

TEST_P(ClassicThreads, ParametersAreSlicesOfTheLine) {
  run_twins(ranks(), classic(uneven(ranks())), Grouping::kOne, [](Twin& twin, int) {
    std::vector<at::Tensor> wholes, slices;
    for (const auto& item : twin.net().named_parameters()) {
      const auto view = dtensor(item.value());
      EXPECT_EQ(view.name(), item.key());
      EXPECT_EQ(view.placements(), std::vector{Placement{Placement::Kind::kFlat}});
      EXPECT_EQ(view.to_local().dim(), 1);
      wholes.push_back(twin.plain().named_parameters()[item.key()].detach().reshape({-1}));
      slices.push_back(view.to_local());
      EXPECT_EQ(view.sizes(), twin.plain().named_parameters()[item.key()].sizes());
    }
    EXPECT_TRUE(at::cat(slices).equal(chunk_here(at::cat(wholes))));
  });
}

// Operators outside of a forward mean what they mean on the whole.
TEST_P(ClassicThreads, OperatorsOnSlices) {
  auto c = classic(uneven(ranks()));
  c.dtype = at::kFloat;
  run_twins(ranks(), c, Grouping::kOne, [](Twin& twin, int) {
    at::NoGradGuard no_grad;
    auto p = as_mlp(twin.net()).layers[0]->weight, q = as_mlp(twin.plain()).layers[0]->weight;
    const auto expect_equal = [](const at::Tensor& got, const at::Tensor& expected) {
      const auto full = dtensor(got).full_tensor();
      ASSERT_EQ(full.sizes(), expected.sizes());
      EXPECT_LT(difference(full, expected), 1e-6);
    };
    const auto row = ramp({7}).to(at::kFloat), column = ramp({17, 1}).to(at::kFloat);
    expect_equal(p * row + column, q * row + column);
    expect_equal(p * torch::full({1, 1}, 2.0), q * 2);
    p.copy_(q * 3);
    expect_equal(p, q * 3);
    p.mul_(row), q.mul_(3).mul_(row);
    expect_equal(p, q);
    expect_equal(at::zeros_like(p).add_(p), q);
    EXPECT_NEAR(p.norm().item<double>(), q.norm().item<double>(), 1e-5);
    EXPECT_NEAR(p.mean().item<double>(), q.mean().item<double>(), 1e-5);
    EXPECT_NEAR(p.max().item<double>(), q.max().item<double>(), 1e-6);
    expect_equal(p.view({7, 17}), q.view({7, 17}));
    expect_equal(p.view(-1).view({17, 7}), q);
    EXPECT_THROW(p.view({7, 18}), NotSupported);
    EXPECT_THROW(p * ramp({6}), NotSupported);
    EXPECT_THROW(p.select(0, 0), NotSupported);
    std::ostringstream text;
    text << dtensor(p);
    EXPECT_NE(text.str().find("placements=[Flat()]"), std::string::npos) << text.str();
  });
}

TEST_P(ClassicThreads, RandomValuesAreThoseOfThePlainModel) {
  const auto drawn = [](torch::nn::Module& net) {
    torch::manual_seed(3);
    at::NoGradGuard no_grad;
    for (auto& parameter : net.parameters()) torch::nn::init::normal_(parameter);
  };
  Case c = classic(uneven(1));
  const auto reference = build(c);
  drawn(*reference);
  for (auto strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kNoShard}) {
    Options options = with(strategy);
    std::mutex one_at_a_time;  // threads share the generator
    run_twins(ranks(), classic(uneven(ranks()), options), Grouping::kChildren, [&](Twin& twin, int) {
      {
        const std::lock_guard lock(one_at_a_time);
        drawn(twin.net());
      }
      for (const auto& item : twin.net().named_parameters()) {
        EXPECT_TRUE(dtensor(item.value()).full_tensor().equal(reference->named_parameters()[item.key()].detach()));
      }
    });
  }
}

TEST_P(ClassicThreads, Lbfgs) {
  run_twins(ranks(), classic(uneven(ranks())), Grouping::kChildren, [](Twin& twin, int) {
    const auto options = torch::optim::LBFGSOptions(0.5).max_iter(4);
    torch::optim::LBFGS plain(twin.plain().parameters(), options), sharded(twin.net().parameters(), options);
    // The mean over the ranks is what each of them must see.
    const auto close = [](torch::optim::LBFGS& optimizer, const std::function<at::Tensor()>& loss) {
      return optimizer.step([&] {
        optimizer.zero_grad();
        const auto value = loss();
        value.backward();
        return all_reduce_mean(value.detach());
      });
    };
    for (int step = 0; step < 2; ++step) {
      close(plain, [&] { return twin.plain_loss(); });
      close(sharded, [&] { return twin.sharded_loss(); });
    }
    twin.expect_equal_parameters();
  });
}

// --- no_sync, clip_grad_norm_ ---------------------------------------------------------------------------------------

TEST_P(ClassicThreads, NoSyncAccumulates) {
  for (auto strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp, ShardingStrategy::kNoShard}) {
    run_wrapped(ranks(), uneven(ranks()), by_layer(strategy), [](Wrapper& model, Net& plain, const at::Tensor& batch) {
      const auto step = [&](double scale) {
        loss_of(plain.forward(batch * scale)).backward();
        loss_of(model(samples_here(batch) * scale)).backward();
      };
      auto& stats = model.state()->context().stats();
      for (int round = 0; round < 2; ++round) {
        plain.zero_grad(), model->zero_grad();
        const auto before = stats.reduces;
        {
          const auto local = model.no_sync();
          step(1.0), step(1.5);
        }
        EXPECT_EQ(stats.reduces, before);
        for (const auto& parameter : model.parameters()) EXPECT_FALSE(parameter.grad().defined());
        EXPECT_GT(stats.unsharded_gradients.now, 0);
        step(0.5);
        EXPECT_EQ(stats.reduces, before + 2);
        EXPECT_EQ(stats.unsharded_gradients.now, 0);
        expect_equal_gradients(*model, plain);
      }
    });
  }
}

TEST_P(ClassicThreads, ClipsByTheNormOfAll) {
  for (auto strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kNoShard}) {
    for (const double order : {2.0, 1.0, HUGE_VAL}) {
      run_wrapped(ranks(), uneven(ranks()), by_layer(strategy),
                  [&](Wrapper& model, Net& plain, const at::Tensor& batch) {
                    loss_of(plain.forward(batch)).backward();
                    loss_of(model(samples_here(batch))).backward();
                    const double expected = torch::nn::utils::clip_grad_norm_(plain.parameters(), 0.01, order);
                    EXPECT_NEAR(model.clip_grad_norm_(0.01, order).item<double>(), expected, 1e-9);
                    expect_equal_gradients(*model, plain);
                  });
    }
  }
}

TEST_P(ClassicThreads, UnitsInsideHaveNoSyncNorClipOfTheirOwn) {
  run_wrapped(ranks(), uneven(ranks()), {}, [](Wrapper&, Net& plain, const at::Tensor&) {
    auto& layers = as_mlp(plain).layers;
    const auto inner = wrapped(layers[0]);
    const auto outer = wrapped(plain.shared_from_this());
    EXPECT_THROW((void)inner.no_sync(), InvalidArgument);
    EXPECT_THROW(inner.clip_grad_norm_(1.0), InvalidArgument);
    (void)outer.no_sync();
  });
}

TEST_P(ClassicThreads, TwoForwardsBeforeTwoBackwards) {
  for (auto strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp, ShardingStrategy::kNoShard}) {
    run_wrapped(ranks(), uneven(ranks()), by_layer(strategy), [](Wrapper& model, Net& plain, const at::Tensor& batch) {
      const auto first = loss_of(model(samples_here(batch))), second = loss_of(model(samples_here(batch) * 2));
      second.backward();
      first.backward();
      (loss_of(plain.forward(batch)) + loss_of(plain.forward(batch * 2))).backward();
      expect_equal_gradients(*model, plain);
    });
  }
}

// --- modules and units ----------------------------------------------------------------------------------------------

TEST_P(ClassicThreads, AppliesToWholeParametersAndFindsUnits) {
  run_wrapped(ranks(), uneven(ranks()), by_layer(), [](Wrapper& model, Net& plain, const at::Tensor&) {
    const auto write = [](torch::nn::Module& each) {
      at::NoGradGuard no_grad;
      if (auto* linear = each.as<Linear>()) linear->weight.select(0, 1).fill_(0.25), linear->bias.mul_(2);
    };
    model.apply(write);
    plain.apply(write);
    for (const auto& item : full_state_dict(model)) {
      EXPECT_TRUE(item.value().equal(plain.named_parameters()[item.key()].detach())) << item.key();
    }
    const auto units = model.fsdp_modules();
    ASSERT_EQ(units.size(), 3u);
    EXPECT_EQ(units[0].fqn(), "");
    EXPECT_EQ(units[1].fqn(), "layer0");
    EXPECT_TRUE(model.check_is_root());
    EXPECT_FALSE(module::is_outermost(*units[1].state()));
    EXPECT_EQ(module::units_in(*units[1].state()).size(), 1u);
  });
}

// --- summon_full_params ---------------------------------------------------------------------------------------------

void expect_same_values(const torch::nn::Module& net, const torch::nn::Module& plain) {
  const auto expected = full_state_dict(plain);
  for (const auto& item : full_state_dict(net)) {
    EXPECT_TRUE(item.value().equal(expected[item.key()])) << item.key();
  }
}

TEST_P(ClassicThreads, SummonedParametersAreWhole) {
  for (auto strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kNoShard}) {
    run_wrapped(ranks(), uneven(ranks()), by_layer(strategy), [](Wrapper& model, Net& plain, const at::Tensor& batch) {
      const auto held = model.parameters();
      {
        auto whole = model.summon_full_params();
        const auto expected = plain.parameters();
        const auto shown = model.parameters();
        for (size_t i = 0; i < shown.size(); ++i) {
          EXPECT_TRUE(shown[i].is_same(held[i]));
          EXPECT_FALSE(is_dtensor(shown[i]));
          EXPECT_TRUE(shown[i].requires_grad());
          EXPECT_TRUE(shown[i].detach().equal(expected[i].detach()));
          EXPECT_EQ(shown[i][0].detach().numel(), expected[i][0].numel());  // any operator
        }
        at::NoGradGuard no_grad;
        // Not to the bit: where several threads make a process's first calls into the math library, it may take
        // other kernels for some of them (2 of 100 processes did, and none of 1,400 later calls).
        EXPECT_LT(difference(model(batch), plain.forward(batch)), 1e-12);
        EXPECT_THROW((void)model.summon_full_params(), InvalidArgument);
        whole.close();
        for (const auto& parameter : held) EXPECT_TRUE(is_dtensor(parameter));
      }
      // Training goes on as if nothing had been.
      loss_of(plain.forward(batch)).backward();
      loss_of(model(samples_here(batch))).backward();
      expect_equal_gradients(*model, plain);
    });
  }
}

TEST_P(ClassicThreads, WhatIsWrittenToSummonedParametersStays) {
  for (auto strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp, ShardingStrategy::kNoShard}) {
    run_wrapped(ranks(), uneven(ranks()), by_layer(strategy), [](Wrapper& model, Net& plain, const at::Tensor& batch) {
      const auto write = [](torch::nn::Module& net) {
        at::NoGradGuard no_grad;
        for (auto& parameter : net.parameters()) {
          parameter.mul_(2);
          parameter[1].fill_(0.25);
        }
      };
      {
        const at::NoGradGuard no_grad;
        model(batch);  // some units may be whole when others are written
      }
      {
        const auto whole = model.summon_full_params({.writeback = false});
        write(*model);
      }
      expect_same_values(*model, plain);
      {
        const auto whole = model.summon_full_params();
        write(*model);
      }
      write(plain);
      expect_same_values(*model, plain);
      const at::NoGradGuard no_grad;
      EXPECT_LT(difference(model(batch), plain.forward(batch)), 1e-12);
    });
  }
}

TEST_P(ClassicThreads, SummonedGradientsAreWhole) {
  for (auto strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kNoShard}) {
    run_wrapped(ranks(), uneven(ranks()), by_layer(strategy), [](Wrapper& model, Net& plain, const at::Tensor& batch) {
      loss_of(plain.forward(batch)).backward();
      loss_of(model(samples_here(batch))).backward();
      for (const bool writeback : {false, true}) {
        auto whole = model.summon_full_params({.writeback = writeback, .with_grads = true});
        for (const auto& item : model->named_parameters()) {
          const auto gradient = item.value().grad();
          EXPECT_FALSE(is_dtensor(gradient));
          EXPECT_LT(difference(gradient, plain.named_parameters()[item.key()].grad()), 1e-9);
          at::NoGradGuard no_grad;
          gradient.mul_(3);
        }
        whole.close();
        for (const auto& parameter : model.parameters()) EXPECT_TRUE(is_dtensor(parameter.grad()));
      }
      at::NoGradGuard no_grad;
      for (const auto& parameter : plain.parameters()) parameter.grad().mul_(3);
      expect_equal_gradients(*model, plain);
    });
  }
}

TEST_P(ClassicThreads, SummonedOnTheFirstRankAlone) {
  run_wrapped(ranks(), uneven(ranks()), by_layer(), [](Wrapper& model, Net& plain, const at::Tensor& batch) {
    EXPECT_THROW((void)model.summon_full_params({.rank0_only = true}), NotSupported);
    EXPECT_THROW((void)model.summon_full_params({.writeback = false, .rank0_only = true, .with_grads = true}),
                 NotSupported);
    {
      const auto whole = model.summon_full_params({.writeback = false, .rank0_only = true});
      for (const auto& item : model->named_parameters()) {
        EXPECT_EQ(is_dtensor(item.value()), rank() != 0);
        if (rank() != 0) continue;
        EXPECT_TRUE(item.value().detach().equal(plain.named_parameters()[item.key()].detach()));
      }
    }
    loss_of(plain.forward(batch)).backward();
    loss_of(model(samples_here(batch))).backward();
    expect_equal_gradients(*model, plain);
  });
}

TEST_P(ClassicThreads, OneUnitIsSummonedAlone) {
  run_wrapped(ranks(), uneven(ranks()), {}, [](Wrapper&, Net& plain, const at::Tensor&) {
    const auto inner = wrapped(as_mlp(plain).layers[0]);
    const auto outer = wrapped(plain.shared_from_this());
    {
      const auto whole = outer.summon_full_params({.recurse = false});
      EXPECT_TRUE(is_dtensor(as_mlp(plain).layers[0]->weight));
      EXPECT_FALSE(is_dtensor(as_mlp(plain).layers[1]->weight));
      const auto others = inner.summon_full_params();
      EXPECT_FALSE(is_dtensor(as_mlp(plain).layers[0]->weight));
    }
    for (const auto& parameter : plain.parameters()) EXPECT_TRUE(is_dtensor(parameter));
  });
}

// Whatever dtype the units are gathered in.
TEST_P(ClassicThreads, SummonedParametersHaveTheirOwnDtype) {
  Options options = by_layer();
  options.mixed_precision.param_dtype = at::kBFloat16;
  run_wrapped(ranks(), uneven(ranks()), options, [](Wrapper& model, Net& plain, const at::Tensor& batch) {
    const at::NoGradGuard no_grad;
    model(samples_here(batch));
    const auto whole = model.summon_full_params();
    for (size_t i = 0; i < plain.parameters().size(); ++i) {
      EXPECT_TRUE(model.parameters()[i].detach().equal(plain.parameters()[i].detach()));
    }
  });
}

TEST_P(ClassicThreads, SummonedParametersAreNotTrainedNorResized) {
  run_wrapped(ranks(), uneven(ranks()), by_layer(), [](Wrapper& model, Net& plain, const at::Tensor& batch) {
    auto& weight = as_mlp(*model).layers[0]->weight;
    auto whole = model.summon_full_params();
    EXPECT_THROW(model(batch), InvalidArgument);
    {
      at::NoGradGuard no_grad;
      weight.set_data(torch::zeros({2, 2}, at::kDouble));
    }
    EXPECT_THROW(whole.close(), InvalidArgument);
    expect_same_values(*model, plain);
    const auto out = model(samples_here(batch));
    EXPECT_THROW(
        {
          const auto inside = model.summon_full_params();
          loss_of(out).backward();  // of what was gathered before: possible, and reduced as ever
          throw InvalidArgument("left");
        },
        InvalidArgument);
    EXPECT_TRUE(is_dtensor(weight.grad()));
    EXPECT_TRUE(is_dtensor(weight));
  });
}

// --- which units, and from which values -----------------------------------------------------------------------------

std::set<std::string> units_of(const FSDPModuleBase& model) {
  std::set<std::string> names;
  for (const auto* group : model.state()->context().groups()) names.insert(group->name());
  return names;
}

TEST_P(ClassicThreads, SizePolicyCountsWhatIsNotWrappedYet) {
  struct Inner : torch::nn::Module {
    Inner() {
      register_module("a", Linear(4, 4));  // 20
      register_module("b", Linear(4, 6));  // 30
      register_module("act", torch::nn::ReLU());
    }
  };
  struct Root : torch::nn::Module {
    Root() {
      register_module("first", std::make_shared<Inner>());
      register_module("second", std::make_shared<Inner>());
      register_module("last", Linear(9, 4));  // 40
    }
  };
  run_ranks(ranks(), [](int) {
    const auto make = [] { return std::make_shared<Root>(); };
    const auto child = [](const Root& root, const char* name) { return root.named_children()[name]; };
    Options options;
    options.auto_wrap_policy = size_based_auto_wrap_policy(30);
    EXPECT_EQ(units_of(wrapped(make(), options)), (std::set<std::string>{"(root)", "first.b", "second.b", "last"}));
    options.auto_wrap_policy = size_based_auto_wrap_policy(31);
    EXPECT_EQ(units_of(wrapped(make(), options)), (std::set<std::string>{"(root)", "first", "second", "last"}));
    options.auto_wrap_policy = size_based_auto_wrap_policy();
    EXPECT_EQ(units_of(wrapped(make(), options)), (std::set<std::string>{"(root)"}));
    options.auto_wrap_policy = module_wrap_policy<Inner, torch::nn::ReLU>();
    EXPECT_EQ(units_of(wrapped(make(), options)), (std::set<std::string>{"(root)", "first", "second"}));
    // What is ignored is not looked into, and stays as it is.
    auto root = make();
    options.ignored_modules = {child(*root, "first")};
    options.ignored_params = {child(*root, "last")->named_parameters()["bias"]};
    EXPECT_EQ(units_of(wrapped(root, options)), (std::set<std::string>{"(root)", "second"}));
    for (const auto& item : root->named_parameters()) {
      const bool ignored = item.key().starts_with("first") || item.key() == "last.bias";
      EXPECT_EQ(is_dtensor(item.value()), !ignored) << item.key();
    }
    // What was wrapped before keeps its unit.
    auto again = make();
    wrapped(child(*again, "first"));
    options = {};
    options.auto_wrap_policy = module_wrap_policy<Inner, Linear>();
    EXPECT_EQ(units_of(wrapped(again, options)),
              (std::set<std::string>{"(root)", "first", "second.a", "second.b", "last"}));
  });
}

TEST_P(ClassicThreads, StatesAreTheFirstRanks) {
  const auto values = [](torch::nn::Module& net, double value) {
    at::NoGradGuard no_grad;
    for (auto& tensor : net.parameters()) tensor.fill_(value);
    for (auto& tensor : net.buffers()) tensor.fill_(value + 1);
  };
  const auto check = [&](const Options& options, int rank) {
    torch::nn::Sequential net(Linear(3, 5), torch::nn::BatchNorm1d(5));
    values(*net, rank);
    net[0]->as<Linear>()->weight.set_data(torch::full({3, 5}, 1.0 * rank).t());  // not contiguous
    auto mine = options;
    mine.sync_module_states = true;
    mine.ignored_params = {net[0]->as<Linear>()->bias};
    const auto model = wrapped(net, mine);
    for (const auto& item : full_state_dict(model)) {
      const bool buffer = item.key().find("running") != std::string::npos || item.key().ends_with("tracked");
      const double expected = item.key() == "0.bias" ? rank : buffer;
      EXPECT_TRUE(item.value().eq(expected).all().item<bool>()) << item.key() << "\n" << item.value();
    }
  };
  run_ranks(ranks(), [&](int rank) {
    check({}, rank);
    check(with(ShardingStrategy::kNoShard), rank);
    auto hybrid = with(ShardingStrategy::kHybridShard);
    const int64_t replicas = ranks() == 4 ? 2 : 1;
    hybrid.mesh = init_device_mesh(at::kCPU, {replicas, ranks() / replicas}, {"replicate", "shard"});
    check(hybrid, rank);
  });
}

TEST_P(ClassicThreads, FullStateDictOnTheFirstRank) {
  run_wrapped(ranks(), uneven(ranks()), by_layer(), [](Wrapper& model, Net& plain, const at::Tensor&) {
    const auto state = full_state_dict(model, {.rank0_only = true});
    EXPECT_EQ(state.size(), rank() == 0 ? plain.parameters().size() : 0);
    for (const auto& item : state) EXPECT_TRUE(item.value().equal(plain.named_parameters()[item.key()].detach()));
    for (const auto& item : state_dict(model)) EXPECT_TRUE(is_dtensor(item.value())) << item.key();
  });
}

FSDP_ON_RANKS(ClassicThreads, 1, 2, 3, 4);

// --- refusals -------------------------------------------------------------------------------------------------------

/// What two ranks are told.
std::string error_of(const std::function<void()>& wrap) {
  std::string message;
  std::mutex mutex;
  run_ranks(2, [&](int) {
    try {
      wrap();
      ADD_FAILURE() << "not refused";
    } catch (const InvalidArgument& error) {
      const std::lock_guard lock(mutex);
      message = error.what();
    }
  });
  return message;
}

TEST(ClassicRefusalThreads, WhatDoesNotFit) {
  const auto expect = [](const std::string& part, const std::function<void()>& wrap) {
    const auto message = error_of(wrap);
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  expect("kHybridShard expects a mesh of two axes, {replicate, shard}, got DeviceMesh(cpu, dp=2)",
         [] { wrapped(Linear(2, 2), with(ShardingStrategy::kHybridShard)); });
  expect("kNoShard expects a mesh of one axis", [] {
    auto options = with(ShardingStrategy::kNoShard);
    options.mesh = init_device_mesh(at::kCPU, {2, 1});
    wrapped(Linear(2, 2), options);
  });
  expect("'weight' is Float, 'bias' is Double; wrap them apart, or cast one", [] {
    Linear net(2, 2);
    net->bias.set_data(net->bias.to(at::kDouble));
    wrapped(net);
  });
  expect("was sharded on another mesh than its enclosing module", [] {
    torch::nn::Sequential net(Linear(2, 2));
    wrapped(net->ptr(0), with(ShardingStrategy::kNoShard));
    wrapped(net);
  });
  expect("FullyShardedDataParallel was already applied to this module", [] {
    Linear net(2, 2);
    wrapped(net);
    wrapped(net);
  });
  expect("FullyShardedDataParallel found no parameters", [] { wrapped(torch::nn::ReLU()); });
  expect("an ignored parameter belongs to unit '(root)' already", [] {
    torch::nn::Sequential net(Linear(2, 2), Linear(2, 2));
    wrapped(net->ptr(0));
    Options options;
    options.ignored_modules = {net->ptr(0)};
    wrapped(net, options);
  });
  expect("belongs to group '0' already, whose module does not contain it here", [] {
    Linear a(2, 2), b(2, 2);
    b->weight = b->register_parameter("tied", a->weight);
    Options options;
    options.auto_wrap_policy = module_wrap_policy<Linear>();
    wrapped(torch::nn::Sequential(a, b), options);
  });
  expect("finds different models", [] {
    auto options = with(rank() == 0 ? ShardingStrategy::kFullShard : ShardingStrategy::kNoShard);
    wrapped(Linear(2, 2), options);
  });
  expect("(sync_module_states) of module", [] {
    Options options;
    options.sync_module_states = true;
    wrapped(Linear(2, 2 + rank()), options);
  });
  expect("size_based_auto_wrap_policy expects at least 1, got 0", [] { size_based_auto_wrap_policy(0); });
}

// Both styles are one engine: units of either may lie inside the other.
TEST(ClassicRefusalThreads, BothStylesInOneModel) {
  auto c = uneven(2);
  c.wrap = [](const NetPtr& net, Grouping) -> Handle {
    fully_shard(as_mlp(*net).layers[0]);
    return wrapped(net);
  };
  expect_parity(2, c, Grouping::kChildren);
  c.wrap = [](const NetPtr& net, Grouping) -> Handle {
    wrapped(as_mlp(*net).layers[0]);
    return fully_shard(net);
  };
  expect_parity(2, c, Grouping::kChildren);
}

// Without a group of ranks every strategy is for this one alone.
TEST(Classic, AloneWithoutAGroup) {
  ASSERT_FALSE(is_initialized());
  for (auto strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp, ShardingStrategy::kNoShard,
                        ShardingStrategy::kHybridShard, ShardingStrategy::kHybridShardZero2}) {
    expect_parity_here(classic(uneven(1), by_layer(strategy)), Grouping::kOne);
  }
}

}  // namespace
}  // namespace fsdp::testing
