// set_symm_mem_for_comm: the ranks of a host read one copy of the parameters in place.
#include <malloc.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>

#include "base/memory.h"
#include "mesh/world.h"
#include "nets.h"
#include "support/processes.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

void share_all(engine::Context& context) {
  for (auto* group : context.groups()) group->share_memory();
  context.note_config_change();
}

Case in_place(Case c) {
  c.configure = [](Handle& model) { share_all(model.state()->context()); };
  return c;
}

struct InPlaceThreads : OnRanks {};

TEST_P(InPlaceThreads, Trains) { expect_parity(ranks(), in_place(mlp({8, 17, 5}, 2 * ranks()))); }

TEST_P(InPlaceThreads, TrainsWhereMostShardsAreEmpty) {
  expect_parity(ranks(), in_place(mlp({3, 2, 1, 3}, 2 * ranks())));
}

TEST_P(InPlaceThreads, TrainsGpt) {
  expect_parity(ranks(), in_place(gpt_case(2 * ranks(), /*tied=*/false)), Grouping::kChildren);
  expect_parity(ranks(), in_place(gpt_case(ranks(), /*tied=*/true)), Grouping::kChildren);
}

TEST_P(InPlaceThreads, TrainsWithoutResharding) {
  auto c = in_place(mlp({8, 17, 5}, 2 * ranks()));
  c.options.reshard_after_forward = false;
  expect_parity(ranks(), c);
}

// Cast into the memory in common once by the rank that has the rows; the shards stay apart.
TEST_P(InPlaceThreads, TrainsInAnotherDtype) {
  auto c = in_place(mlp({8, 17, 5}, 2 * ranks()));
  c.options.mp_policy.param_dtype = at::kFloat;
  c.options.mp_policy.reduce_dtype = at::kDouble;
  c.tolerance = 1e-4;
  expect_parity(ranks(), c);
}

TEST_P(InPlaceThreads, TrainsPartsOfAnotherDim) {
  auto c = in_place(mlp({60, 30, 60}, 2 * ranks()));
  c.options.shard_placement_fn = [](const at::Tensor& p) -> std::optional<Placement> {
    if (p.dim() < 2) return std::nullopt;
    return Placement{Placement::Kind::kShard, 1};
  };
  expect_parity(ranks(), c);
}

TEST_P(InPlaceThreads, NothingIsGathered) {
  run_twins(ranks(), in_place(mlp({8, 17, 5}, 2 * ranks())), Grouping::kChildren, [](Twin& twin, int) {
    auto& stats = twin.context().stats();
    for (int step = 0; step < 2; ++step) twin.train_step();
    EXPECT_EQ(stats.gathers, 0);
    EXPECT_EQ(stats.unsharded_params.peak, 0);
    EXPECT_NE(twin.model().schedule().find("open in place"), std::string::npos);
    twin.expect_equal_parameters();
  });
}

// By the public name, after the optimizer was made and has a state, and one group after another.
TEST_P(InPlaceThreads, MovesBetweenSteps) {
  run_twins(ranks(), mlp({8, 17, 5}, 2 * ranks()), Grouping::kChildren, [](Twin& twin, int) {
    twin.train_step();
    layer_group(twin.net(), 1).set_symm_mem_for_comm();
    twin.train_step();
    layer_group(twin.net(), 0).set_symm_mem_for_comm();
    layer_group(twin.net(), 0).set_symm_mem_for_comm();  // no change
    twin.train_step();
    twin.expect_equal_parameters();
  });
}

// What else reads and writes shards: the fused optimizer, clipping, state dicts, loading.
TEST_P(InPlaceThreads, ShardsAreAsEverToEverybodyElse) {
  run_twins(ranks(), in_place(mlp({8, 17, 5}, 2 * ranks())), Grouping::kChildren, [](Twin& twin, int) {
    const auto options = torch::optim::AdamWOptions(1e-2).eps(1e-3);
    optim::AdamW ours(twin.net().parameters(), options);
    torch::optim::AdamW theirs(twin.plain().parameters(), options);
    const auto train = [&](int steps) {
      for (int step = 0; step < steps; ++step) {
        twin.zero_grad();
        twin.plain_loss().backward();
        twin.sharded_loss().backward();
        torch::nn::utils::clip_grad_norm_(twin.plain().parameters(), 0.1);
        clip_grad_norm_(twin.net().parameters(), 0.1);
        ours.step();
        theirs.step();
      }
    };
    train(2);
    const auto kept = full_state_dict(twin.net());
    train(2);
    twin.expect_equal_parameters();
    {
      at::NoGradGuard no_grad;
      for (const auto* net : {&twin.plain(), &twin.net()}) {
        for (const auto& item : net->named_parameters()) item.value().copy_(kept[item.key()]);
      }
    }
    train(2);
    twin.expect_equal_parameters();
  });
}

// Ranks that use different parts: opening a group is nobody else's business, its reduction is.
TEST_P(InPlaceThreads, UnevenUse) { expect_parity(ranks(), in_place(uneven_use_case(ranks()))); }

FSDP_ON_RANKS(InPlaceThreads, 1, 2, 3, 5);

// --- no rank writes while another reads ------------------------------------------------------------------------------

thread_local int delayed_at = -1;

void point(int number) {
  if (number == delayed_at) std::this_thread::sleep_for(std::chrono::milliseconds(40));
}

constexpr int kPoints = 8;

Case with_points(int64_t samples) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        net.add("a", torch::nn::Linear(4, 6));
        net.add("b", torch::nn::Linear(6, 3));
      },
      [](FunctionNet& net, const at::Tensor& x) {
        auto h = at::tanh(net.module<torch::nn::LinearImpl>("a").forward(x));
        point(h.requires_grad() ? 3 : 1);
        if (h.requires_grad()) {
          h.register_hook([](const at::Tensor& gradient) {
            point(5);
            return gradient;
          });
        }
        return net.module<torch::nn::LinearImpl>("b").forward(h);
      });
  c.batch = ramp({samples, 4});
  return in_place(c);
}

// One rank is late at one point of an evaluation, a write by hand, a training step: it reads what it should all the
// same, and so do the others. No collective of the test's own keeps them together.
TEST(InPlaceFencesThreads, OneRankIsLate) {
  for (const int ranks : {2, 3}) {
    run_twins(ranks, with_points(2 * ranks), Grouping::kChildren, [&](Twin& twin, int rank) {
      const auto late = [&](int victim, int number, auto&& act) {
        delayed_at = rank == victim ? number : -1;
        act();
        delayed_at = -1;
      };
      for (int victim = 0; victim < ranks; ++victim) {
        for (int number = 0; number < kPoints; ++number) {
          SCOPED_TRACE(::testing::Message() << "rank " << victim << " is late at point " << number);
          {
            at::NoGradGuard no_grad;
            const auto expected = twin.plain().forward(twin.samples_here(twin.the_case().batch));
            at::Tensor got;
            late(victim, number, [&] {
              point(0);
              got = twin.model()(twin.samples_here(twin.the_case().batch));
            });
            EXPECT_LT(difference(got, expected), 1e-12) << "evaluation, rank " << rank;
            for (auto* net : {&twin.plain(), &twin.net()}) {
              for (auto& parameter : net->parameters()) parameter.mul_(1.5).sub_(0.01);
            }
          }
          twin.zero_grad();
          const auto expected = twin.plain().forward(twin.samples_here(twin.the_case().batch));
          twin.plain_loss().backward();
          late(victim, number, [&] {
            point(2);
            const auto got = twin.model()(twin.samples_here(twin.the_case().batch));
            EXPECT_LT(difference(got.detach(), expected.detach()), 1e-12) << "training, rank " << rank;
            point(4);
            twin.the_case().loss(got).backward();
            point(6);
            twin.optimizer_step();
            point(7);
          });
        }
      }
      twin.expect_equal_parameters();
    });
  }
}

// --- what one rank writes where it should not stays its own ----------------------------------------------------------

Case one_weight(std::function<void(const at::Tensor& weight)> meddle) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        net.add("w", torch::randn({6, 4}, at::kDouble));
      },
      [meddle](FunctionNet& net, const at::Tensor& x) {
        meddle(net.at("w"));
        return at::linear(x, net.at("w"));
      });
  c.batch = ramp({4, 4});
  c.same_data = true;
  return in_place(c);
}

TEST(InPlaceWritesThreads, AWriteByPointerIsOwnAndForgotten) {
  static thread_local bool meddles;
  const auto c = one_weight([](const at::Tensor& weight) {
    if (meddles) static_cast<double*>(weight.view({-1}).data_ptr())[rank() * 12] += 100;
  });
  run_twins(2, c, Grouping::kOne, [](Twin& twin, int rank) {
    at::NoGradGuard no_grad;
    for (const int writer : {0, 1}) {
      meddles = false;
      const auto expected = twin.plain().forward(twin.the_case().batch);
      meddles = rank == writer;
      const auto got = twin.model()(twin.the_case().batch);
      meddles = false;
      barrier();
      EXPECT_EQ(difference(got, expected) > 1, rank == writer) << rank;
      twin.model().reshard();
      EXPECT_LT(difference(twin.model()(twin.the_case().batch), expected), 1e-12) << rank;
    }
  });
}

TEST(InPlaceWritesThreads, AWriteByAnOperatorInsideForwardIsRefused) {
  static thread_local bool meddles;
  const auto c = one_weight([](const at::Tensor& weight) {
    at::NoGradGuard no_grad;
    if (meddles) weight.view({-1}).add_(1);
  });
  run_twins(2, c, Grouping::kOne, [](Twin& twin, int) {
    meddles = true;
    try {
      twin.model()(twin.the_case().batch);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("parameter 'w' was written in place"), std::string::npos)
          << error.what();
    }
    meddles = false;
    twin.model().reset_iter_state();
    twin.train_step();
    twin.expect_equal_parameters();
  });
}

TEST(InPlaceWritesThreads, UnshardByHandMakesACopy) {
  run_twins(2, one_weight([](const at::Tensor&) {}), Grouping::kOne, [](Twin& twin, int rank) {
    twin.train_step();
    const auto before = twin.plain().parameters()[0].detach().clone();
    twin.model().unshard();
    if (rank == 1) {
      at::NoGradGuard no_grad;
      dtensor(twin.net().parameters()[0]).to_local().fill_(7);
    }
    barrier();
    if (rank == 0) {
      const auto& leaf = twin.model().state()->group().params()[0]->leaf();
      const auto seen = torch::from_blob(base::storage_bytes(leaf), {6, 4}, at::kDouble);
      EXPECT_LT(difference(seen, before), 1e-12);
    }
    barrier();
    twin.model().reshard();
  });
}

TEST(InPlaceWritesThreads, RefusesWhatHasNoPlaceBesideIt) {
  run_twins(2, mlp({4, 4}, 2), Grouping::kOne, [](Twin& twin, int) {
    struct Nothing : CustomReduceScatter {
      WaitFn run(const at::Tensor&, const at::Tensor&) override { return {}; }
    };
    const auto custom = std::make_shared<Nothing>();
    twin.model().set_custom_reduce_scatter(custom);
    EXPECT_THROW(twin.model().set_symm_mem_for_comm(), NotSupported);
    EXPECT_THROW(twin.model().set_allocate_memory_from_process_group_for_comm(true), InvalidArgument);
    twin.model().set_custom_reduce_scatter(nullptr);
    twin.model().set_allocate_memory_from_process_group_for_comm(true);
    twin.model().set_symm_mem_for_comm();
    EXPECT_THROW(twin.model().set_custom_reduce_scatter(custom), NotSupported);
    const auto out = twin.sharded_loss();
    twin.train_step();
    twin.expect_equal_parameters();
  });
}

// --- processes -------------------------------------------------------------------------------------------------------

FSDP_PROCESS_BODY(trains_in_place) {
  init_process_group({.engine = "shm", .timeout = std::chrono::seconds(60)});
  for (const auto grouping : {Grouping::kOne, Grouping::kChildren}) {
    expect_parity_here(in_place(mlp({8, 17, 5}, 2 * world_size())), grouping);
    expect_parity_here(in_place(gpt_case(2 * world_size(), /*tied=*/false)), grouping);
  }
  barrier();
  destroy_process_group();
}

FSDP_PROCESS_BODY(refuses_over_gloo) {
  init_process_group({.engine = "gloo", .timeout = std::chrono::seconds(60)});
  const auto c = mlp({8, 17, 5}, 2 * world_size());
  Twin twin(c, Grouping::kOne);
  EXPECT_THROW(twin.model().set_symm_mem_for_comm(), NotSupported);
  twin.train_step();
  twin.expect_equal_parameters();
  barrier();
  destroy_process_group();
}

/// This process's share of the memory that it has written or shares with its peers, in bytes: what several map counts
/// once in all. Without its share of the libraries, which falls whenever any other program of the machine loads them.
double pss() {
  ::malloc_trim(0);
  std::ifstream rollup("/proc/self/smaps_rollup");
  double bytes = 0;
  int found = 0;
  for (std::string line; std::getline(rollup, line);) {
    for (const std::string kind : {"Pss_Anon:", "Pss_Shmem:"}) {
      if (line.rfind(kind, 0) != 0) continue;
      bytes += std::stod(line.substr(kind.size())) * 1024;
      ++found;
    }
  }
  if (found != 2) throw std::runtime_error("smaps_rollup lacks Pss_Anon or Pss_Shmem (Linux 5.9 has them)");
  return bytes;
}

// What all ranks together hold of a model whose parameters stay whole after forward, over the size of one copy of them.
FSDP_PROCESS_BODY(holds_parameters) {
  init_process_group({.engine = "shm", .timeout = std::chrono::seconds(60)});
  const bool shared = process_arguments()[0] == "in place";
  const auto run = [&](int64_t width) {
    torch::nn::Sequential net;
    for (int i = 0; i < 4; ++i) net->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
    std::vector<FSDPModuleBase> groups;
    for (const auto& layer : *net) {
      groups.push_back(fully_shard(layer.ptr<torch::nn::LinearImpl>(), {.reshard_after_forward = false}));
    }
    auto model = fully_shard(net);
    for (auto& group : groups) {
      if (shared) group.set_symm_mem_for_comm();
    }
    at::NoGradGuard no_grad;
    model(at::ones({1, width}));
    barrier();
    return model;
  };
  run(8);  // whatever the first step loads
  const auto before = pss();
  barrier();
  const int64_t width = 2048;
  const auto model = run(width);
  const auto held = at::full({1}, pss() - before, at::kDouble);
  barrier();
  mesh::World::current()->channel().all_reduce(held, comm::ReduceOp::kSum)->wait();
  const double copies = held.item<double>() / (4.0 * width * width * 4);
  if (shared) {
    EXPECT_GT(copies, 0.95);
    EXPECT_LT(copies, 1.3);
  } else {
    EXPECT_GT(copies, world_size() + 0.8) << "the measurement misses copies";
  }
  destroy_process_group();
}

TEST(InPlaceMemoryProcs, RanksHoldOneCopyTogether) {
  run_processes(3, "holds_parameters", {.arguments = {"in place"}});
  run_processes(3, "holds_parameters", {.arguments = {"copied"}});
}

TEST(InPlaceProcs, TrainsOnTwo) { run_processes(2, "trains_in_place"); }
TEST(InPlaceProcs, TrainsOnThree) { run_processes(3, "trains_in_place"); }
TEST(InPlaceProcs, RefusesWhereNoMemoryIsShared) { run_processes(2, "refuses_over_gloo"); }

}  // namespace
}  // namespace fsdp::testing
