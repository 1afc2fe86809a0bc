// A group in the flat layout, without a face: gathers, and reduces what was captured.
#include <fsdp/device_mesh.h>
#include <fsdp/error.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "engine/context.h"
#include "engine/param_group.h"
#include "support/ranks.h"

namespace fsdp::engine {
namespace {

struct PlainSlot : Slot {
  explicit PlainSlot(bool trains) : trains(trains) {}
  bool requires_grad() const override { return trains; }
  at::Tensor run_gradient_hooks(at::Tensor gradient) override { return gradient; }
  void accumulate_gradient(const at::Tensor& local) override { grad = grad.defined() ? grad + local : local.clone(); }
  void run_post_accumulate_hooks() override {}
  bool trains;
  at::Tensor grad;
};

at::Tensor counting(std::vector<int64_t> sizes, double from) {
  int64_t numel = 1;
  for (const auto size : sizes) numel *= size;
  return torch::arange(numel, torch::kDouble).add(from).view(sizes).set_requires_grad(true);
}

struct Model {
  std::vector<NamedParam> params{{"weight", counting({3, 5}, 0)},
                                 {"scalar", counting({}, 100)},
                                 {"empty", counting({0, 4}, 0)},
                                 {"frozen", counting({7}, 200)},
                                 {"last", counting({4, 2}, 300)}};
  std::shared_ptr<Context> context;
  std::unique_ptr<ParamGroup> group;

  explicit Model(int ranks) {
    params[3].tensor.set_requires_grad(false);
    const auto mesh = init_device_mesh(at::kCPU, {ranks});
    group = std::make_unique<ParamGroup>("flat", params, mesh, DtypePolicy{}, Layout::kFlat);
    for (const auto& param : group->params()) {
      param->set_slot(std::make_unique<PlainSlot>(param->name() != "frozen"));
    }
    context = Context::create({group.get()}, mesh);
  }
};

/// The elements of the line that rank `rank` of `ranks` holds, of those from `lead` on.
at::Tensor chunk(const at::Tensor& whole, int64_t lead, int64_t line, int64_t ranks, int64_t rank) {
  const int64_t size = (line + ranks - 1) / ranks;
  const auto flat = whole.detach().reshape({-1});
  const auto within = [&](int64_t i) { return std::clamp<int64_t>(i - lead, 0, flat.numel()); };
  return flat.slice(0, within(size * rank), within(size * (rank + 1)));
}

class FlatGroupThreads : public ::testing::TestWithParam<int> {};

TEST_P(FlatGroupThreads, HoldsAChunkOfTheLineAndGathersIt) {
  testing::run_ranks(GetParam(), [](int rank) {
    Model model(GetParam());
    int64_t lead = 0;
    for (size_t i = 0; i < model.params.size(); ++i) {
      const auto& whole = model.params[i].tensor;
      EXPECT_TRUE(torch::equal(model.group->params()[i]->shard(), chunk(whole, lead, 31, GetParam(), rank)));
      lead += whole.numel();
    }
    ASSERT_EQ(lead, 31);
    EXPECT_EQ(model.group->sharded_bytes(), 8 * chunk(torch::zeros(31), 0, 31, GetParam(), rank).numel());
    // What a rank wrote arrives at all.
    at::NoGradGuard no_grad;
    for (const auto& param : model.group->params()) param->shard().mul_(2);
    for (int round = 0; round < 2; ++round) {
      model.group->begin_gather();
      model.group->finish_gather();
      for (size_t i = 0; i < model.params.size(); ++i) {
        at::AutoDispatchBelowADInplaceOrView below;
        c10::impl::ExcludeDispatchKeyGuard plain(kKey);
        EXPECT_TRUE(torch::equal(model.group->params()[i]->leaf(), model.params[i].tensor.detach() * 2));
      }
      model.group->reshard();
    }
  });
}

TEST_P(FlatGroupThreads, ReducesToItsChunk) {
  testing::run_ranks(GetParam(), [](int rank) {
    Model model(GetParam());
    const auto& params = model.group->params();
    for (const size_t i : {0, 1, 2, 4}) {
      const auto gradient = counting(model.params[i].tensor.sizes().vec(), 1000.0 * (rank + 1)).detach();
      model.group->store_gradient(*params[i], gradient);
    }
    model.group->begin_reduce();
    const std::vector<uint8_t> used{1, 1, 1, 0, 1};
    model.group->finish_reduce(used.data());
    int64_t lead = 0;
    for (size_t i = 0; i < params.size(); ++i) {
      auto& slot = static_cast<PlainSlot&>(params[i]->slot());
      if (i == 3) {
        EXPECT_FALSE(slot.grad.defined());
      } else {
        auto mean = torch::zeros_like(model.params[i].tensor);
        for (int r = 0; r < GetParam(); ++r) mean = mean + counting(mean.sizes().vec(), 1000.0 * (r + 1)).detach();
        const auto expected = chunk(mean / GetParam(), lead, 31, GetParam(), rank);
        ASSERT_EQ(slot.grad.sizes(), expected.sizes());
        EXPECT_TRUE(torch::allclose(slot.grad, expected));
      }
      lead += model.params[i].tensor.numel();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, FlatGroupThreads, ::testing::Values(1, 2, 3, 4, 5, 9));

TEST(FlatGroupRefusalThreads, SeveralDtypes) {
  testing::run_ranks(2, [](int) {
    const std::vector<NamedParam> params{{"a", torch::zeros(3)}, {"b", torch::zeros(3, torch::kHalf)}};
    try {
      ParamGroup group("flat", params, init_device_mesh(at::kCPU, {2}), DtypePolicy{}, Layout::kFlat);
      FAIL() << "was not refused";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("'b' is Half"), std::string::npos) << error.what();
    }
  });
}

}  // namespace
}  // namespace fsdp::engine
