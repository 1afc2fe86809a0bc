// Reductions to one number are those of the whole, equal on every rank; flat views, joined and cut apart again.
#include <cmath>
#include <limits>

#include "sharded.h"

namespace fsdp::testing {
namespace {

struct Reduction {
  const char* name;
  std::function<at::Tensor(const at::Tensor& a, const at::Tensor& b)> run;
};

void expect_like_plain(const std::vector<int64_t>& sizes, const std::vector<Reduction>& reductions,
                       at::ScalarType dtype = at::kDouble) {
  on_ranks([&](int) {
    Sharded s({sizes, sizes}, dtype);
    at::NoGradGuard no_grad;
    for (const auto& reduction : reductions) {
      const auto expected = reduction.run(s.plain[0], s.plain[1]);
      const auto got = reduction.run(s.sharded[0], s.sharded[1]);
      EXPECT_FALSE(is_dtensor(got)) << reduction.name;
      EXPECT_EQ(got.sizes(), expected.sizes()) << reduction.name;
      EXPECT_EQ(got.scalar_type(), expected.scalar_type()) << reduction.name << " " << sizes;
      const double tolerance = expected.scalar_type() == at::kBFloat16 ? 2e-2
                               : expected.scalar_type() == at::kFloat  ? 1e-5
                                                                       : 1e-12;
      EXPECT_NEAR(got.item<double>(), expected.item<double>(), tolerance * (1 + std::abs(expected.item<double>())))
          << reduction.name << " " << sizes;
    }
  });
}

const std::vector<Reduction>& reductions() {
  static const std::vector<Reduction> all = {
      {"norm", [](auto& a, auto&) { return a.norm(); }},
      {"norm 1", [](auto& a, auto&) { return a.norm(1); }},
      {"norm 3", [](auto& a, auto&) { return a.norm(3); }},
      {"norm 0", [](auto& a, auto&) { return a.norm(0); }},
      {"linalg_vector_norm", [](auto& a, auto&) { return at::linalg_vector_norm(a, 2); }},
      {"linalg_vector_norm 1.5", [](auto& a, auto&) { return at::linalg_vector_norm(a, 1.5); }},
      {"sum", [](auto& a, auto&) { return a.sum(); }},
      {"sum of squares", [](auto& a, auto&) { return a.pow(2).sum(); }},
      {"sum of booleans", [](auto& a, auto&) { return (a > 0).sum(); }},
      {"sum to float", [](auto& a, auto&) { return a.sum(at::kFloat); }},
      {"any", [](auto& a, auto&) { return (a > 1.5).any(); }},
      {"all", [](auto& a, auto&) { return (a > -1.5).all(); }},
      {"all of truth", [](auto& a, auto&) { return (a > -3).all(); }},
      {"dot", [](auto& a, auto& b) { return a.view(-1).dot(b.view(-1)); }},
  };
  return all;
}

const std::vector<Reduction>& of_something() {  // an empty tensor has no maximum
  static const std::vector<Reduction> all = {
      {"norm inf", [](auto& a, auto&) { return a.norm(std::numeric_limits<double>::infinity()); }},
      {"vector norm -inf",
       [](auto& a, auto&) { return at::linalg_vector_norm(a, -std::numeric_limits<double>::infinity()); }},
      {"max", [](auto& a, auto&) { return a.max(); }},
      {"min", [](auto& a, auto&) { return a.min(); }},
      {"max of longs", [](auto& a, auto&) { return at::full_like(a, 3, at::kLong).max(); }},
      {"mean", [](auto& a, auto&) { return a.mean(); }},
  };
  return all;
}

TEST(ReduceThreads, LikePlain) {
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{5, 3}, {17}, {}, {1, 4}}) {
    expect_like_plain(sizes, reductions());
    expect_like_plain(sizes, of_something());
  }
  expect_like_plain({0, 3}, reductions());
}

TEST(ReduceThreads, Bfloat16) { expect_like_plain({5, 3}, {reductions()[0], reductions()[6]}, at::kBFloat16); }

TEST(ReduceThreads, Equal) {
  on_ranks([&](int) {
    Sharded s({{5, 3}, {5, 3}});
    at::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(s.sharded[0], s.sharded[0].clone()));
    EXPECT_FALSE(at::equal(s.sharded[0], s.sharded[1]));
  });
}

TEST(FlatViewThreads, ViewCatAndSlice) {
  on_ranks([&](int) {
    Sharded s({{5, 3}, {2}, {}, {7, 1, 2}});
    at::NoGradGuard no_grad;
    const auto join = [](const std::vector<at::Tensor>& tensors) {
      std::vector<at::Tensor> flat;
      for (const auto& tensor : tensors) flat.push_back(tensor.view(-1));
      return at::cat(flat);
    };
    const auto joined = join(s.sharded), expected = join(s.plain);
    EXPECT_TRUE(is_dtensor(joined));
    EXPECT_EQ(joined.sizes(), expected.sizes());
    EXPECT_TRUE(at::equal(whole(joined), expected));
    EXPECT_TRUE(at::equal(whole(joined * 2 + joined), expected * 2 + expected));
    EXPECT_NEAR(joined.dot(joined).item<double>(), expected.dot(expected).item<double>(), 1e-12);
    EXPECT_NEAR(joined.abs().sum().item<double>(), expected.abs().sum().item<double>(), 1e-12);
    // As LBFGS does: each parameter gets its part of a direction.
    int64_t offset = 0;
    for (size_t i = 0; i < s.sharded.size(); ++i) {
      const auto n = s.plain[i].numel();
      s.sharded[i].add_(joined.slice(0, offset, offset + n).view_as(s.sharded[i]), 0.5);
      s.plain[i].add_(expected.slice(0, offset, offset + n).view_as(s.plain[i]), 0.5);
      EXPECT_TRUE(at::equal(whole(s.sharded[i]), s.plain[i])) << i;
      offset += n;
    }
    // A flat view shares memory.
    s.sharded[0].view(-1).zero_();
    EXPECT_EQ(whole(s.sharded[0]).abs().sum().item<double>(), 0);
  });
}

TEST(FlatViewThreads, Shapes) {
  on_ranks([&](int) {
    Sharded s({{4, 6}});
    at::NoGradGuard no_grad;
    const auto &w = s.sharded[0], &p = s.plain[0];
    EXPECT_TRUE(at::equal(whole(w.view({4, 2, 3})), p.view({4, 2, 3})));
    EXPECT_TRUE(at::equal(whole(w.reshape({4, 6})), p));
    EXPECT_TRUE(at::equal(whole(w.flatten()), p.flatten()));
    EXPECT_TRUE(at::equal(whole(w.view(-1).view({4, 6})), p));
    EXPECT_TRUE(at::equal(whole(w.slice(0, 0, 4)), p));
    expect_refused([&] { w.view({6, 4}); }, {"aten::view", "'p0'", "keep its rows"});
    expect_refused([&] { w.view(-1).slice(0, 0, 5); }, {"aten::slice", "whole parameters"});
    expect_refused([&] { w.slice(0, 1, 3); }, {"aten::slice", "'p0'", "need the whole"});
    expect_refused([&] { w.slice(1, 0, 3); }, {"aten::slice", "'p0'"});
    expect_refused([&] { at::cat({w, w}); }, {"aten::cat", "only flattened"});
  });
}

}  // namespace
}  // namespace fsdp::testing
