// Gathers that move something else than rows: fsdp::TensorExtension.
#include <atomic>

#include "nets.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

/// Rows in 8 bits, and a scale for each.
struct Int8Rows : TensorExtension {
  std::vector<at::Tensor> pre_all_gather(const at::Tensor& rows) override {
    const auto scale = rows.abs().amax({1}, /*keepdim=*/true).clamp_min(1e-12) / 127;
    return {(rows / scale).round().to(at::kChar), scale};
  }
  void post_all_gather(const std::vector<at::Tensor>& sent, const at::Tensor& rows) override {
    EXPECT_EQ(sent[0].sizes(), rows.sizes());
    rows.copy_(sent[0].to(rows.scalar_type()) * sent[1]);
  }
};

/// Elements in half precision.
struct Halves : TensorExtension {
  std::vector<at::Tensor> pre_all_gather(const at::Tensor& rows) override { return {rows.to(at::kHalf)}; }
  void post_all_gather(const std::vector<at::Tensor>& sent, const at::Tensor& rows) override { rows.copy_(sent[0]); }
};

/// What a gather makes of a whole weight.
at::Tensor after_gather(TensorExtension& extension, const at::Tensor& weight) {
  auto out = at::empty_like(weight);
  extension.post_all_gather(extension.pre_all_gather(weight), out);
  return out;
}

/// Its weights go through a gather first where it is the plain one, and their gradients are those of what comes out.
struct CoarseNet : Net {
  CoarseNet() {
    for (int i = 0; i < 2; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(6, 7)));
      back.push_back(register_module("back" + std::to_string(i), torch::nn::Linear(7, 6)));
    }
  }
  at::Tensor seen(const at::Tensor& weight) const {
    if (!plain_through) return weight;
    const auto values = weight.detach();
    return weight + (after_gather(*plain_through, values) - values);
  }
  at::Tensor forward(const at::Tensor& x) override {
    auto h = x;
    for (size_t i = 0; i < layers.size(); ++i) {
      h = at::tanh(at::linear(h, seen(layers[i]->weight), layers[i]->bias));
      h = at::linear(h, seen(back[i]->weight), back[i]->bias);
    }
    return h;
  }
  std::vector<torch::nn::Linear> layers, back;
  std::shared_ptr<TensorExtension> plain_through;
};

template <class Extension>
Case coarse() {
  Case c;
  c.make = [] { return std::make_shared<CoarseNet>(); };
  c.batch = ramp({60, 6});  // that any number of ranks here divides
  c.options.tensor_extension_fn = [](const at::Tensor& p) -> std::shared_ptr<TensorExtension> {
    return p.dim() == 2 ? std::make_shared<Extension>() : nullptr;
  };
  return c;
}

struct ExtensionThreads : OnRanks {
  template <class Extension>
  void trains(const Case& c) {
    for (const auto grouping : {Grouping::kOne, Grouping::kChildren}) {
      run_twins(ranks(), c, grouping, [&](Twin& twin, int) {
        dynamic_cast<CoarseNet&>(twin.plain()).plain_through = std::make_shared<Extension>();
        for (int step = 0; step < 3; ++step) twin.train_step();
        twin.expect_equal_parameters();
        EXPECT_EQ(twin.context().stats().unsharded_gradients.now, 0);
        for (const auto* group : twin.context().groups()) {
          for (const auto& param : group->params()) {
            EXPECT_EQ(param->leaf().storage().nbytes(), 0) << param->name() << " is still whole";
          }
        }
      });
    }
  }
};

TEST_P(ExtensionThreads, TrainsInEightBits) { trains<Int8Rows>(coarse<Int8Rows>()); }

TEST_P(ExtensionThreads, TrainsWithoutResharding) {
  auto c = coarse<Int8Rows>();
  c.options.reshard_after_forward = false;
  trains<Int8Rows>(c);
}

TEST_P(ExtensionThreads, TrainsCutAlongAnotherDim) {
  auto c = coarse<Halves>();
  c.options.shard_placement_fn = [ranks = ranks()](const at::Tensor& p) -> std::optional<Placement> {
    if (p.dim() < 2 || p.size(1) % ranks != 0) return std::nullopt;
    return Placement{Placement::Kind::kShard, 1};
  };
  trains<Halves>(c);
}

TEST_P(ExtensionThreads, FewerBytesAreGathered) {
  run_twins(ranks(), coarse<Int8Rows>(), Grouping::kChildren, [&](Twin& twin, int) {
    twin.sharded_loss().backward();
    auto& group = fsdp_module(dynamic_cast<CoarseNet&>(twin.net()).layers[0]).state()->group();
    const int64_t rows = (7 + ranks() - 1) / ranks() * ranks();  // padded
    EXPECT_EQ(group.unsharded_bytes(), rows * 6 + rows * 8 + 7 * 8);
    EXPECT_EQ(twin.context().stats().unsharded_params.now, 0);
  });
}

FSDP_ON_RANKS(ExtensionThreads, 1, 2, 3, 5);

TEST(ExtensionHybridThreads, Trains) {
  auto c = coarse<Int8Rows>();
  c.mesh_shape = {2, 2};
  run_twins(4, c, Grouping::kChildren, [&](Twin& twin, int) {
    dynamic_cast<CoarseNet&>(twin.plain()).plain_through = std::make_shared<Int8Rows>();
    for (int step = 0; step < 3; ++step) twin.train_step();
  });
}

TEST(ExtensionEdgesThreads, RowsAreInTheDtypeOfThePolicy) {
  auto c = coarse<Halves>();
  c.options.mp_policy.param_dtype = at::kFloat;
  struct Looks : Halves {
    void post_all_gather(const std::vector<at::Tensor>& sent, const at::Tensor& rows) override {
      EXPECT_EQ(rows.scalar_type(), at::kFloat);
      EXPECT_FALSE(at::GradMode::is_enabled());
      Halves::post_all_gather(sent, rows);
    }
  };
  c.options.tensor_extension_fn = [](const at::Tensor& p) -> std::shared_ptr<TensorExtension> {
    return p.dim() == 2 ? std::make_shared<Looks>() : nullptr;
  };
  run_twins(2, c, Grouping::kChildren, [&](Twin& twin, int) { twin.sharded_loss().backward(); });
}

TEST(ExtensionEdgesThreads, WhatOneThrowsFailsAllRanksOnce) {
  std::atomic<bool> throws = false;
  struct Bad : Halves {
    Bad(std::atomic<bool>& t, int r) : throws(t), rank(r) {}
    std::vector<at::Tensor> pre_all_gather(const at::Tensor& rows) override {
      TORCH_CHECK(rank != 1 || !throws, "out of scale");
      return Halves::pre_all_gather(rows);
    }
    std::atomic<bool>& throws;
    int rank;
  };
  auto c = coarse<Halves>();
  c.options.tensor_extension_fn = [&](const at::Tensor& p) -> std::shared_ptr<TensorExtension> {
    return p.dim() == 2 ? std::make_shared<Bad>(throws, rank()) : nullptr;
  };
  run_twins(2, c, Grouping::kChildren, [&](Twin& twin, int rank) {
    dynamic_cast<CoarseNet&>(twin.plain()).plain_through = std::make_shared<Halves>();
    twin.train_step();
    barrier();
    throws = true;
    barrier();
    try {
      twin.sharded_loss().backward();
      ADD_FAILURE() << "rank " << rank << " saw no error";
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("out of scale"), std::string::npos) << error.what();
    }
    throws = false;
    twin.model().reset_iter_state();
    barrier();
    twin.train_step();
    twin.expect_equal_parameters();
  });
}

std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(ExtensionRefusalThreads, WhatCannotBe) {
  run_ranks(4, [&](int rank) {
    const auto expect = [](const std::string& part, const std::function<void()>& act) {
      const auto error = error_of(act);
      EXPECT_NE(error.find(part), std::string::npos) << error;
    };
    const auto with = [](std::shared_ptr<TensorExtension> extension) {
      FullyShardOptions options;
      options.tensor_extension_fn = [extension](const at::Tensor& p) { return p.dim() == 2 ? extension : nullptr; };
      return options;
    };
    expect("reshard_after_forward is a number; use true or false", [&] {
      auto options = with(std::make_shared<Halves>());
      options.reshard_after_forward = int64_t{2};
      fully_shard(torch::nn::Linear(4, 4), options);
    });
    expect("finds different models",
           [&] { fully_shard(torch::nn::Linear(4, 4), with(rank == 0 ? std::make_shared<Halves>() : nullptr)); });
    expect("pre_all_gather of parameter 'weight' threw", [&] {
      struct Nothing : Halves {
        std::vector<at::Tensor> pre_all_gather(const at::Tensor&) override { return {}; }
      };
      fully_shard(torch::nn::Linear(4, 4), with(std::make_shared<Nothing>()));
    });
    expect("parameters with an extension",
           [&] { fully_shard(torch::nn::Linear(4, 4), with(std::make_shared<Halves>())).set_symm_mem_for_comm(); });
    expect("what its extension made of what was sent", [&] {
      struct Writes : Net {
        Writes() { weight = register_parameter("weight", torch::ones({4, 4})); }
        at::Tensor forward(const at::Tensor& x) override {
          at::NoGradGuard no_grad;
          weight.mul_(2);
          return x;
        }
        at::Tensor weight;
      };
      fully_shard(NetPtr(std::make_shared<Writes>()), with(std::make_shared<Halves>()))(torch::ones({1, 4}));
    });
  });
}

}  // namespace
}  // namespace fsdp::testing
