// Ranks that do different things: right, or an error on every rank. Never a hang, never a wrong value.
#include "cases.h"

namespace fsdp::testing {
namespace {

at::Tensor input(int rank) { return at::linspace(-1, 1 + rank, 12).view({2, 6}); }

Uneven<Stack> uneven(std::function<std::vector<size_t>(int rank, int step)> route) {
  Uneven<Stack> c;
  c.make = [] { return Stack(4, 6); };
  c.shard = shard_blocks;
  c.loss = [route](Stack& net, const Forward& forward, int rank, int step) {
    net->route = route(rank, step);
    return forward(input(rank)).pow(2).mean();
  };
  return c;
}

TEST(DivergeThreads, OneRankSkipsABlock) {
  expect_mean_of_ranks(uneven([](int rank, int) {
    return rank == 0 ? std::vector<size_t>{0, 1, 2, 3} : std::vector<size_t>{0, 2, 3};
  }));
}

TEST(DivergeThreads, OneRankSkipsABlockNowAndThen) {
  auto c = uneven([](int rank, int step) {
    if (step % 3 == 1 && rank == 0) return std::vector<size_t>{0, 1, 3};
    if (step % 3 == 2 && rank == 1) return std::vector<size_t>{1, 2, 3};
    return std::vector<size_t>{0, 1, 2, 3};
  });
  c.steps = 7;
  expect_mean_of_ranks(c);
}

TEST(DivergeThreads, RanksUseDifferentBlocks) {
  expect_mean_of_ranks(uneven([](int rank, int) {
    return rank == 0 ? std::vector<size_t>{0, 1} : std::vector<size_t>{2, 3};
  }));
}

TEST(DivergeThreads, RanksUseBlocksInAnotherOrder) {
  expect_mean_of_ranks(uneven([](int rank, int) {
    return rank == 0 ? std::vector<size_t>{0, 1, 2, 3} : std::vector<size_t>{3, 2, 1, 0};
  }));
}

TEST(DivergeThreads, TheOrderChangesFromStepToStep) {
  auto c = uneven([](int rank, int step) {
    const std::vector<std::vector<size_t>> routes{{0, 1, 2, 3}, {3, 1}, {2, 0, 2}, {1, 1, 1}, {0, 3, 2, 1}};
    return routes[static_cast<size_t>((step + 2 * rank) % 5)];
  });
  c.steps = 10;
  expect_mean_of_ranks(c);
}

TEST(DivergeThreads, ThreeRanksEachItsOwnWay) {
  auto c = uneven([](int rank, int step) {
    const std::vector<std::vector<size_t>> routes{{0, 1, 2, 3}, {3}, {2, 0}, {1, 1, 1, 0}};
    return routes[static_cast<size_t>((step + rank) % 4)];
  });
  c.ranks = 3;
  c.steps = 8;
  expect_mean_of_ranks(c);
}

// Branches that are summed, each its own group; one rank may cut one off from autograd, after its forward used it. The
// other rank then waits for a reduction that this one cannot issue yet, while this one waits for a gather.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    branches = register_module("branches", torch::nn::ModuleList());
    for (int i = 0; i < 6; ++i) branches->push_back(torch::nn::Linear(6, 6));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor sum = at::zeros({2, 6});
    for (int i = 0; i < 6; ++i) {
      const auto y = torch::tanh(branches->ptr<torch::nn::LinearImpl>(static_cast<size_t>(i))->forward(x));
      sum = sum + (i == cut ? y.detach() : y);
    }
    return sum;
  }
  torch::nn::ModuleList branches{nullptr};
  int cut = -1;
};
TORCH_MODULE(Branches);

TEST(DivergeThreads, OneRankCutsABlockOffFromAutograd) {
  for (const int from_step : {0, 2}) {
    for (const int which : {5, 3, 0}) {
      SCOPED_TRACE(::testing::Message() << "branch " << which << " from step " << from_step);
      Uneven<Branches> c;
      c.make = [] { return Branches(); };
      c.shard = [](Branches& net, const DeviceMesh& mesh) {
        for (const auto& branch : *net->branches) fully_shard(branch, {.mesh = mesh});
        return fully_shard(net, {.mesh = mesh});
      };
      c.loss = [=](Branches& net, const Forward& forward, int rank, int step) {
        net->cut = rank == 1 && step >= from_step ? which : -1;
        return forward(input(rank).requires_grad_()).pow(2).mean();
      };
      expect_mean_of_ranks(c);
    }
  }
}

/// Both ranks get an error where rank 1 leaves the common path; after a reset on both, the next step is right.
void expect_both_refused(const std::function<void(int rank, FSDPModule<Stack>& model)>& part,
                         const std::vector<std::string>& words, int good_steps) {
  Recipe<Stack> recipe;
  recipe.make = [] { return Stack(3, 6); };
  recipe.shard = shard_blocks;
  recipe.body = [&](Side<Stack>& run) {
    torch::optim::SGD optimizer(run.net->parameters(), 0.1);
    const auto step = [&] {
      optimizer.zero_grad();
      run.forward(input(0)).pow(2).mean().backward();
      optimizer.step();
    };
    for (int i = 0; i < good_steps; ++i) step();
    if (run.handle) {
      const auto begin = std::chrono::steady_clock::now();
      const auto what = error_of([&] { part(run.rank, *run.handle); });
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
      EXPECT_NE(what, "") << "rank " << run.rank;
      for (const auto& word : words) EXPECT_NE(what.find(word), std::string::npos) << word << " is not in: " << what;
      run.handle->reset_iter_state();
    }
    for (int i = 0; i < 2; ++i) step();
    return parameters_and_gradients(*run.net);
  };
  expect_like_plain(recipe);
}

TEST(DivergeThreads, OneRankRunsAnExtraEvalForward) {
  for (const int good_steps : {0, 2}) {
    expect_both_refused(
        [](int rank, auto& model) {
          if (rank == 1) {
            at::NoGradGuard no_grad;
            model(input(1));
          }
          model(input(0)).sum().backward();
        },
        {"no_grad", "begins a forward", "reset_iter_state()"}, good_steps);
  }
}

TEST(DivergeThreads, OneRankRunsBackwardTheOtherForward) {
  for (const int good_steps : {0, 2}) {
    expect_both_refused(
        [](int rank, auto& model) {
          const auto loss = model(input(0)).sum();
          if (rank == 1) model(input(1));
          loss.backward();
        },
        {"begins a forward", "begins a backward", "reset_iter_state()"}, good_steps);
  }
}

TEST(DivergeThreads, OneRankSkipsBackward) {
  for (const int good_steps : {0, 2}) {
    expect_both_refused(
        [](int rank, auto& model) {
          const auto loss = model(input(0)).sum();
          if (rank == 0) loss.backward();
          model(input(0)).sum().backward();
        },
        {"begins a forward", "begins a backward", "reset_iter_state()"}, good_steps);
  }
}

TEST(DivergeThreads, OneRankForgetsSync) {
  expect_both_refused(
      [](int rank, auto& model) {
        if (rank == 1) model.set_requires_gradient_sync(false);
        const auto guard = std::shared_ptr<void>(nullptr, [&](void*) { model.set_requires_gradient_sync(true); });
        model(input(0)).sum().backward();
      },
      {"different settings"}, 1);
}

TEST(DivergeThreads, OneRankFreezesAParameter) {
  expect_both_refused(
      [](int rank, auto& model) {
        auto& weight = model->head->weight;
        if (rank == 1) weight.requires_grad_(false);
        const auto guard = std::shared_ptr<void>(nullptr, [&](void*) { weight.requires_grad_(true); });
        model(input(0)).sum().backward();
      },
      {"require gradients"}, 1);
}

// A rank whose loss does not depend on the model runs no backward of it: the other hears of it at the next meeting.
TEST(DivergeThreads, OneRankEndsEarly) {
  const auto errors = errors_of(2, [](int rank) {
    Stack net(3, 6);
    auto model = shard_blocks(net, {});
    for (int step = 0; step < (rank == 0 ? 4 : 3); ++step) model(input(rank)).sum().backward();
  });
  EXPECT_NE(errors[0], "");
  EXPECT_EQ(errors[1], "");
}

// An eval forward in which ranks take other blocks, in inference mode and under no_grad, between training steps.
TEST(DivergeThreads, EvalOverDifferentBlocks) {
  Recipe<Stack> recipe;
  recipe.make = [] { return Stack(4, 6); };
  recipe.shard = shard_blocks;
  recipe.body = [](Side<Stack>& run) {
    torch::optim::SGD optimizer(run.net->parameters(), 0.1);
    Values values;
    for (int step = 0; step < 4; ++step) {
      for (int rank = 0; rank < 2; ++rank) {
        // Plain: what each rank must see. Sharded: ranks run their own at once.
        if (run.handle && rank != run.rank) continue;
        at::NoGradGuard no_grad;
        run.net->route = rank == 0 ? std::vector<size_t>{0, 2} : std::vector<size_t>{3, 1, 0};
        const auto y = run.forward(input(rank)).sum();
        if (run.handle) {
          values.push_back(rank == 0 ? y : at::zeros({}));
          values.push_back(rank == 1 ? y : at::zeros({}));
        } else {
          values.push_back(y);
        }
      }
      run.net->route = {};
      optimizer.zero_grad();
      run.forward(input(0)).pow(2).mean().backward();
      optimizer.step();
    }
    if (run.handle) {
      // The other rank's value, so that both have all.
      for (auto& value : values) value = all_reduce_mean(value.detach()) * 2;
    }
    const auto rest = parameters_and_gradients(*run.net);
    values.insert(values.end(), rest.begin(), rest.end());
    return values;
  };
  expect_like_plain(recipe);
}

}  // namespace
}  // namespace fsdp::testing
