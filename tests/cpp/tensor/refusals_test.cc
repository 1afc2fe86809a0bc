// What cannot be done on a shard says so: the operator, the parameter, and what to call.
#include <sstream>

#include "sharded.h"

namespace fsdp::testing {
namespace {

TEST(RefusalsThreads, OperatorsThatNeedTheWhole) {
  on_ranks([&](int) {
    Sharded s({{5, 3}, {3, 4}});
    at::NoGradGuard no_grad;
    const auto &w = s.sharded[0], &v = s.sharded[1];
    const std::vector<std::pair<std::string, std::function<void()>>> refused = {
        {"aten::mm", [&] { at::mm(w, v); }},
        {"aten::linear",
         [&] {
           at::linear(torch::ones({2, 3}, at::kDouble), w);
         }},
        {"aten::t", [&] { w.t(); }},
        {"aten::select", [&] { w[0]; }},
        {"aten::index",
         [&] {
           w.index({torch::tensor({0, 1})});
         }},
        {"aten::sum", [&] { w.sum(0); }},
        {"aten::mean", [&] { w.mean(1); }},
        {"aten::softmax", [&] { w.softmax(1); }},
        {"aten::sort", [&] { w.sort(); }},
        {"aten::embedding",
         [&] {
           at::embedding(w, torch::tensor({0, 1}));
         }},
        {"aten::expand",
         [&] {
           w.expand({2, 5, 3});
         }},
        {"aten::multinomial", [&] { at::multinomial(w.abs(), 1); }},
        {"aten::cumsum", [&] { w.cumsum(0); }},
    };
    for (const auto& [name, run] : refused) expect_refused(run, {name, "'p0' (sizes [5, 3])", "full_tensor()"});
    expect_refused([&] { w.t(); }, {"rank " + std::to_string(rank()), "model(x)", "unshard()"});
  });
}

TEST(RefusalsThreads, TensorsThatLieDifferently) {
  on_ranks([&](int) {
    Sharded s({{5, 3}, {3}, {1, 3}});
    at::NoGradGuard no_grad;
    const auto& w = s.sharded[0];
    expect_refused([&] { w + s.sharded[1]; }, {"aten::add", "'p0'", "'p1'", "lies differently"});
    expect_refused([&] { w* s.sharded[2]; }, {"aten::mul", "'p2'", "lies differently"});
    expect_refused([&] { w + torch::ones({2, 5, 3}, at::kDouble); }, {"aten::add", "more dims"});
    expect_refused([&] { w + torch::ones({4, 3}, at::kDouble); }, {"aten::add", "does not fit"});
    expect_refused([&] { w.view(-1).dot(torch::ones({15}, at::kDouble)); }, {"aten::dot", "'p0'", "full_tensor()"});
    expect_refused([&] { at::linalg_vector_norm(w, 2, std::vector<int64_t>{0}); }, {"'p0'", "full_tensor()"});
  });
}

TEST(RefusalsThreads, GradMode) {
  on_ranks([&](int) {
    Sharded s({{5, 3}});
    const auto& w = s.sharded[0];
    expect_refused([&] { w * 2; }, {"aten::mul", "'p0'", "gradients being recorded", "model(x)"});
    expect_refused([&] { w.sum(); }, {"aten::sum", "'p0'", "gradients being recorded"});
    expect_refused([&] { w.view(-1); }, {"aten::view", "'p0'"});
    // No graph is recorded by these.
    EXPECT_TRUE(is_dtensor(w.detach()));
    EXPECT_TRUE(is_dtensor(at::zeros_like(w)));
    EXPECT_TRUE(is_dtensor(w.detach() * 2));
  });
}

TEST(RefusalsThreads, DataCannotBeReplaced) {
  on_ranks([&](int) {
    Sharded s({{5, 3}});
    auto& w = s.sharded[0];
    const auto other = torch::ones({5, 3}, at::kDouble);
    EXPECT_THROW(w.set_data(other), NotSupported);
    EXPECT_THROW(w.data_ptr<double>(), std::exception);
    EXPECT_TRUE(at::equal(whole(w), s.plain[0]));
  });
}

TEST(RefusalsThreads, OrdinaryTensorsAreNoDTensors) {
  on_ranks([&](int) {
    EXPECT_FALSE(is_dtensor(torch::ones({2})));
    EXPECT_FALSE(is_dtensor(at::Tensor()));
    EXPECT_THROW(dtensor(torch::ones({2})), InvalidArgument);
    EXPECT_THROW(dtensor(at::Tensor()), InvalidArgument);
  });
}

TEST(DTensorThreads, SaysHowItLies) {
  on_ranks([&](int ranks) {
    Sharded s({{5, 3}, {}});
    const auto w = dtensor(s.sharded[0]);
    EXPECT_EQ(w.name(), "p0");
    EXPECT_EQ(w.sizes(), (std::vector<int64_t>{5, 3}));
    ASSERT_EQ(w.placements().size(), 1u);
    EXPECT_EQ(w.placements()[0], (Placement{Placement::Kind::kShard, 0}));
    EXPECT_EQ(w.device_mesh().size(), ranks);
    const int64_t chunk = (5 + ranks - 1) / ranks, begin = std::min<int64_t>(5, chunk * rank());
    const int64_t rows = std::min<int64_t>(5, begin + chunk) - begin;
    ASSERT_EQ(w.to_local().sizes(), (std::vector<int64_t>{rows, 3}));
    EXPECT_TRUE(at::equal(w.to_local(), s.plain[0].narrow(0, begin, rows)));
    // Shares memory.
    at::NoGradGuard no_grad;
    w.to_local().add_(1);
    EXPECT_TRUE(at::equal(w.full_tensor(), s.plain[0] + 1));
    std::ostringstream text;
    text << w;
    EXPECT_NE(text.str().find("DTensor('p0', sizes=[5, 3], placements=[Shard(0)]"), std::string::npos) << text.str();
  });
}

TEST(DTensorThreads, IsMadeOfPartsOrOfAWhole) {
  on_ranks([&](int ranks) {
    Sharded s({{5, 30}});
    at::NoGradGuard no_grad;
    const auto& parameter = s.sharded[0];
    const auto mesh = dtensor(parameter).device_mesh();
    const auto mask = (torch::arange(150, at::kDouble).view({5, 30}) % 2);
    const auto cut = DTensor::distribute(mask, mesh);
    EXPECT_TRUE(at::equal(cut.full_tensor(), mask));
    EXPECT_EQ(cut.to_local().sizes(), dtensor(parameter).to_local().sizes());
    EXPECT_FALSE(cut.to_local().is_alias_of(mask));
    // Beside a parameter that lies alike.
    EXPECT_TRUE(at::equal(whole(parameter * cut.tensor()), s.plain[0] * mask));
    parameter.mul_(cut.tensor());
    EXPECT_TRUE(at::equal(whole(parameter), s.plain[0] * mask));

    const auto local = dtensor(parameter).to_local().clone();
    const auto made = DTensor::from_local(local, mesh, {5, 30});
    EXPECT_TRUE(made.to_local().is_alias_of(local));
    EXPECT_TRUE(at::equal(made.full_tensor(), whole(parameter)));

    const auto other = made.redistribute(1);
    EXPECT_EQ(other.placements()[0], (Placement{Placement::Kind::kShard, 1}));
    EXPECT_EQ(other.to_local().sizes(), (std::vector<int64_t>{5, 30 / ranks}));
    EXPECT_TRUE(at::equal(other.full_tensor(), whole(parameter)));
    EXPECT_TRUE(at::equal(other.redistribute(0).to_local(), local));

    EXPECT_THROW(DTensor::from_local(torch::ones({6, 30}), mesh, {5, 30}), InvalidArgument);
    EXPECT_THROW(DTensor::distribute(torch::ones({5}), mesh, 1), InvalidArgument);
    EXPECT_THROW(DTensor::distribute(torch::ones({2, 31}), DeviceMesh()), InvalidArgument);
    if (ranks > 1) {
      EXPECT_THROW(DTensor::distribute(torch::ones({2, 31}), mesh, 1), InvalidArgument);
    }
  });
}

}  // namespace
}  // namespace fsdp::testing
