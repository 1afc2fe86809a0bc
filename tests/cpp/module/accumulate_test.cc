// Several forwards or backwards for one optimizer step.
#include "nets.h"

namespace fsdp::testing {
namespace {

struct AccumulateThreads : OnRanks {
  Case net() const { return mlp({6, 17, 9, 4}, 2 * ranks()); }
  void on_twins(const std::function<void(Twin& twin)>& body) const {
    for (auto grouping : {Grouping::kOne, Grouping::kChildren}) {
      run_twins(ranks(), net(), grouping, [&](Twin& twin, int) { body(twin); });
    }
  }
};

at::Tensor micro_batch(const Twin& twin, int i) { return twin.the_case().batch * (1.0 + 0.5 * i); }

TEST_P(AccumulateThreads, EveryBackwardReduces) {
  on_twins([](Twin& twin) {
    for (int step = 0; step < 3; ++step) {
      twin.zero_grad();
      for (int i = 0; i < 3; ++i) {
        twin.plain_loss(micro_batch(twin, i)).backward();
        twin.sharded_loss(micro_batch(twin, i)).backward();
        twin.expect_equal_gradients();
      }
      twin.optimizer_step();
    }
    twin.expect_equal_parameters();
  });
}

TEST_P(AccumulateThreads, OnlyTheLastBackwardReduces) {
  on_twins([](Twin& twin) {
    auto& stats = twin.context().stats();
    for (int step = 0; step < 3; ++step) {
      twin.zero_grad();
      for (int i = 0; i < 3; ++i) {
        twin.model().set_requires_gradient_sync(i == 2);
        const auto reduces = stats.reduces;
        twin.plain_loss(micro_batch(twin, i)).backward();
        twin.sharded_loss(micro_batch(twin, i)).backward();
        if (i < 2) {
          EXPECT_EQ(stats.reduces, reduces);
          for (const auto& parameter : twin.net().parameters()) EXPECT_FALSE(parameter.grad().defined());
        }
      }
      twin.expect_equal_gradients();
      twin.optimizer_step();
      EXPECT_EQ(stats.unsharded_gradients.now, 0);
    }
    twin.expect_equal_parameters();
  });
}

// With reshard_after_backward off the parameters stay whole between micro-batches, but not over an optimizer step.
TEST_P(AccumulateThreads, ParametersStayWholeBetweenMicroBatches) {
  on_twins([](Twin& twin) {
    auto& stats = twin.context().stats();
    twin.model().set_reshard_after_forward(false);
    twin.model().set_reshard_after_backward(false);
    for (int step = 0; step < 3; ++step) {
      twin.zero_grad();
      for (int i = 0; i < 2; ++i) {
        const auto gathers = stats.gathers;
        twin.model().set_requires_gradient_sync(i == 1);
        twin.plain_loss(micro_batch(twin, i)).backward();
        twin.sharded_loss(micro_batch(twin, i)).backward();
        if (i == 1) {
          EXPECT_EQ(stats.gathers, gathers) << "step " << step;
        }
      }
      twin.expect_equal_gradients();
      twin.optimizer_step();
    }
    twin.expect_equal_parameters();
  });
}

TEST_P(AccumulateThreads, RetainGraphTwiceDoublesGradients) {
  on_twins([](Twin& twin) {
    for (int step = 0; step < 3; ++step) {
      twin.zero_grad();
      const auto plain = twin.plain_loss();
      const auto sharded = twin.sharded_loss();
      plain.backward({}, /*retain_graph=*/true);
      sharded.backward({}, /*retain_graph=*/true);
      twin.expect_equal_gradients();
      plain.backward();
      sharded.backward();
      twin.expect_equal_gradients();
      twin.optimizer_step();
    }
    twin.expect_equal_parameters();
  });
}

TEST_P(AccumulateThreads, TwoLossesOfOneForward) {
  on_twins([](Twin& twin) {
    const auto first = [](const at::Tensor& out) { return out.select(1, 0).pow(2).mean(); };
    const auto second = [](const at::Tensor& out) { return out.select(1, 1).exp().mean(); };
    for (int step = 0; step < 3; ++step) {
      twin.zero_grad();
      const auto plain = twin.plain().forward(twin.the_case().batch);
      const auto sharded = twin.model()(twin.samples_here(twin.the_case().batch));
      first(plain).backward({}, true);
      first(sharded).backward({}, true);
      twin.expect_equal_gradients();
      second(plain).backward();
      second(sharded).backward();
      twin.expect_equal_gradients();
      twin.optimizer_step();
    }
    twin.expect_equal_parameters();
  });
}

TEST_P(AccumulateThreads, TwoForwardsThenTheirBackwardsApart) {
  on_twins([](Twin& twin) {
    for (int step = 0; step < 3; ++step) {
      twin.zero_grad();
      const auto plain0 = twin.plain_loss(micro_batch(twin, 0)), plain1 = twin.plain_loss(micro_batch(twin, 1));
      const auto ours0 = twin.sharded_loss(micro_batch(twin, 0)), ours1 = twin.sharded_loss(micro_batch(twin, 1));
      plain1.backward();
      ours1.backward();
      twin.expect_equal_gradients();
      plain0.backward();
      ours0.backward();
      twin.expect_equal_gradients();
      twin.optimizer_step();
    }
    twin.expect_equal_parameters();
  });
}

TEST_P(AccumulateThreads, SeveralForwardsOneBackward) {
  on_twins([](Twin& twin) {
    auto& stats = twin.context().stats();
    for (int step = 0; step < 3; ++step) {
      twin.zero_grad();
      at::Tensor plain = at::zeros({}, at::kDouble), ours = plain.clone();
      for (int i = 0; i < 3; ++i) {
        plain = plain + twin.plain_loss(micro_batch(twin, i));
        ours = ours + twin.sharded_loss(micro_batch(twin, i));
      }
      const auto reduces = stats.reduces;
      plain.backward();
      ours.backward();
      // Each group once: gradients of all three forwards arrive together.
      EXPECT_LE(stats.reduces - reduces, 2 * static_cast<int64_t>(twin.context().groups().size()));
      if (step == 2) {
        int64_t with_parameters = 0;
        for (const auto* group : twin.context().groups()) with_parameters += !group->params().empty();
        EXPECT_EQ(stats.reduces - reduces, with_parameters);
      }
      twin.expect_equal_gradients();
      twin.optimizer_step();
    }
    twin.expect_equal_parameters();
  });
}

// A backward that is thrown away and one whose gradients are not kept.
TEST_P(AccumulateThreads, ForwardsWithoutBackward) {
  on_twins([](Twin& twin) {
    for (int step = 0; step < 3; ++step) {
      twin.sharded_loss(micro_batch(twin, 1));
      twin.train_step();
      twin.sharded_loss(micro_batch(twin, 2));
      twin.sharded_loss(micro_batch(twin, 3));
    }
    twin.expect_equal_parameters();
  });
}

TEST_P(AccumulateThreads, GradOfParametersIsThisRanksOwn) {
  on_twins([](Twin& twin) {
    for (int step = 0; step < 2; ++step) {
      twin.zero_grad();
      const auto here = twin.samples_here(twin.the_case().batch);
      const auto ours = torch::autograd::grad({twin.model()(here).pow(2).mean()}, twin.net().parameters());
      const auto theirs = torch::autograd::grad({twin.plain().forward(here).pow(2).mean()}, twin.plain().parameters());
      for (size_t i = 0; i < ours.size(); ++i) EXPECT_LT(difference(ours[i], theirs[i]), 1e-9) << i;
      for (const auto& parameter : twin.net().parameters()) EXPECT_FALSE(parameter.grad().defined());
      twin.train_step();
    }
    twin.expect_equal_parameters();
  });
}

FSDP_ON_RANKS(AccumulateThreads, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
