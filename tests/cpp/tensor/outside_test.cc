// Operators over sharded tensors outside forward and backward: which run, and that they give what plain tensors give.
#include <mutex>

#include <ATen/CPUGeneratorImpl.h>

#include "sharded.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

using Tensors = std::vector<at::Tensor>;
struct Operator {
  const char* name;
  std::function<at::Tensor(at::Tensor a, at::Tensor b)> run;
};

/// Applies each to p0 and p1 (of equal sizes), plain and sharded: equal results, and equal values left in both.
void expect_like_plain(const std::vector<Operator>& operators, bool sharded_result = true) {
  on_ranks([&](int) {
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{5, 3}, {2}, {}, {4, 2, 2}, {0, 3}}) {
      for (const auto& op : operators) {
        Sharded s({sizes, sizes});
        at::NoGradGuard no_grad;
        const auto expected = op.run(s.plain[0], s.plain[1]);
        const auto got = op.run(s.sharded[0], s.sharded[1]);
        EXPECT_EQ(is_dtensor(got), sharded_result) << op.name;
        EXPECT_EQ(got.sizes(), expected.sizes()) << op.name;
        EXPECT_EQ(got.scalar_type(), expected.scalar_type()) << op.name;
        const auto all = whole(got).to(at::kDouble), reference = expected.to(at::kDouble);
        EXPECT_TRUE(at::allclose(all, reference, 1e-12, 1e-12, /*equal_nan=*/true))
            << op.name << " " << sizes << "\ngot\n"
            << all << "\nexpected\n"
            << expected;
        for (size_t i = 0; i < 2; ++i) {
          EXPECT_TRUE(at::equal(whole(s.sharded[i]), s.plain[i])) << op.name << " leaves another p" << i;
        }
      }
    }
  });
}

TEST(OutsideThreads, Pointwise) {
  expect_like_plain({
      {"add", [](auto a, auto b) { return a + b; }},
      {"add scalar", [](auto a, auto) { return a + 3; }},
      {"rsub", [](auto a, auto) { return 1 - a; }},
      {"mul", [](auto a, auto b) { return a * b; }},
      {"div", [](auto a, auto b) { return a / b; }},
      {"0-dim operand", [](auto a, auto) { return a * at::full({}, 2.5, at::kDouble); }},
      {"exp", [](auto a, auto) { return a.exp(); }},
      {"abs sqrt", [](auto a, auto) { return a.abs().sqrt(); }},
      {"neg", [](auto a, auto) { return -a; }},
      {"pow", [](auto a, auto) { return a.pow(2); }},
      {"clamp", [](auto a, auto) { return a.clamp(-0.5, 0.5); }},
      {"maximum", [](auto a, auto b) { return at::maximum(a, b); }},
      {"where", [](auto a, auto b) { return at::where(a > 0, a, b); }},
      {"eq", [](auto a, auto b) { return a == b; }},
      {"isnan", [](auto a, auto) { return a.log().isnan(); }},
      {"lerp", [](auto a, auto b) { return a.lerp(b, 0.3); }},
      {"addcmul", [](auto a, auto b) { return at::addcmul(a, a, b, 0.5); }},
      {"sign", [](auto a, auto) { return a.sign(); }},
      {"clone", [](auto a, auto) { return a.clone(); }},
      {"detach", [](auto a, auto) { return a.detach(); }},
      {"to float", [](auto a, auto) { return a.to(at::kFloat); }},
      {"to the same", [](auto a, auto) { return a.to(at::kDouble); }},
  });
}

TEST(OutsideThreads, InPlace) {
  expect_like_plain({
      {"add_", [](auto a, auto b) { return a.add_(b, 0.5); }},
      {"sub_", [](auto a, auto b) { return a.sub_(b); }},
      {"mul_", [](auto a, auto) { return a.mul_(0.9); }},
      {"div_", [](auto a, auto) { return a.div_(3); }},
      {"addcdiv_", [](auto a, auto b) { return a.addcdiv_(b, b.abs() + 1, -0.1); }},
      {"addcmul_", [](auto a, auto b) { return a.addcmul_(b, b, 0.2); }},
      {"lerp_", [](auto a, auto b) { return a.lerp_(b, 0.1); }},
      {"zero_", [](auto a, auto) { return a.zero_(); }},
      {"fill_", [](auto a, auto) { return a.fill_(7); }},
      {"copy_", [](auto a, auto b) { return a.copy_(b); }},
      {"clamp_", [](auto a, auto) { return a.clamp_(-1, 1); }},
      {"sqrt_", [](auto a, auto) { return a.abs_().sqrt_(); }},
      {"add_ of itself", [](auto a, auto) { return a.add_(a); }},
      {"through detach",
       [](auto a, auto) {
         a.detach().add_(1);
         return a.detach();
       }},
  });
}

TEST(OutsideThreads, Like) {
  expect_like_plain({
      {"zeros_like", [](auto a, auto) { return at::zeros_like(a); }},
      {"ones_like", [](auto a, auto) { return at::ones_like(a); }},
      {"full_like", [](auto a, auto) { return at::full_like(a, 1.5); }},
      {"zeros_like of a dtype", [](auto a, auto) { return at::zeros_like(a, at::kLong); }},
      {"empty_like", [](auto a, auto) { return at::empty_like(a).fill_(2); }},
      {"zeros_like, written", [](auto a, auto b) { return at::zeros_like(a).add_(b).mul_(a); }},
  });
}

// The same seed gives what a plain tensor would get, on any number of ranks.
TEST(OutsideThreads, Random) {
  static std::mutex mutex;  // the default generator is shared by threads
  const auto seeded = [](auto op) {
    return [op](at::Tensor a, at::Tensor b) {
      const std::lock_guard lock(mutex);
      torch::manual_seed(11);
      return op(a, b);
    };
  };
  expect_like_plain({
      {"normal_", seeded([](auto a, auto) { return a.normal_(0, 0.02); })},
      {"uniform_", seeded([](auto a, auto) { return a.uniform_(-1, 1); })},
      {"bernoulli_", seeded([](auto a, auto) { return a.bernoulli_(0.3); })},
      {"rand_like", seeded([](auto a, auto) { return at::rand_like(a); })},
      {"randn_like", seeded([](auto a, auto) { return at::randn_like(a); })},
      {"two draws", seeded([](auto a, auto b) {
         a.normal_();
         return b.normal_();
       })},
      {"exponential_ of a generator",
       [](auto a, auto) { return a.exponential_(1.5, at::make_generator<at::CPUGeneratorImpl>(5)); }},
  });
}

TEST(OutsideThreads, Foreach) {
  on_ranks([&](int) {
    Sharded s({{5, 3}, {2}, {}, {7}, {0}});
    at::NoGradGuard no_grad;
    const auto both = [&](const std::function<Tensors(Tensors)>& op) {
      const auto expected = op(s.plain), got = op(s.sharded);
      ASSERT_EQ(got.size(), expected.size());
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(is_dtensor(got[i]));
        EXPECT_TRUE(at::allclose(whole(got[i]), expected[i], 1e-12, 1e-12, true)) << i;
      }
    };
    both([](Tensors t) { return at::_foreach_add(t, t, 2); });
    both([](Tensors t) { return at::_foreach_mul(t, 3.0); });
    both([](Tensors t) { return at::_foreach_abs(t); });
    both([](Tensors t) {
      at::_foreach_mul_(t, 0.5);
      return t;
    });
    both([](Tensors t) {
      at::_foreach_addcmul_(t, t, t, 0.1);
      return t;
    });
    both([](Tensors t) {
      at::_foreach_add_(t, {1.0, 2.0, 3.0, 4.0, 5.0});
      return t;
    });
    both([](Tensors t) {
      at::_foreach_lerp_(t, at::_foreach_neg(t), 0.25);
      return t;
    });
    both([](Tensors t) {
      at::_foreach_zero_(t);
      return t;
    });
  });
}

TEST(OutsideThreads, PlainOperands) {
  on_ranks([&](int) {
    Sharded s({{5, 3}, {}});
    at::NoGradGuard no_grad;
    const auto& w = s.sharded[0];
    const auto full = torch::arange(15, at::kDouble).view({5, 3});
    w.copy_(full);
    EXPECT_TRUE(at::equal(whole(w), full));
    EXPECT_TRUE(at::equal(whole(w + full), full + full));
    EXPECT_TRUE(at::equal(whole(full * w), full * full));
    const auto row = torch::arange(3, at::kDouble), column = torch::arange(5, at::kDouble).view({5, 1});
    EXPECT_TRUE(at::equal(whole(w * row), full * row));
    EXPECT_TRUE(at::equal(whole(w * column), full * column));
    EXPECT_TRUE(at::equal(whole(w * row.view({1, 3})), full * row));
    w.copy_(row);  // broadcasts
    EXPECT_TRUE(at::equal(whole(w), row.expand({5, 3})));
    s.sharded[1].copy_(torch::full({}, 4.0, at::kDouble));
    EXPECT_EQ(whole(s.sharded[1]).item<double>(), 4);
    w.copy_(full.to(at::kFloat));
    EXPECT_TRUE(at::equal(whole(w), full));
  });
}

// An average or an optimizer's state from before sharding becomes sharded when it is written.
TEST(OutsideThreads, PlainTensorsAreAdoptedWhenWritten) {
  on_ranks([&](int) {
    Sharded s({{5, 3}, {}});
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < 2; ++i) {
      auto average = s.plain[i].clone().mul_(2), expected = average.clone();
      average.lerp_(s.sharded[i], 0.1);
      expected.lerp_(s.plain[i], 0.1);
      EXPECT_TRUE(is_dtensor(average));
      EXPECT_TRUE(at::allclose(whole(average), expected));
      average.mul_(0.9).add_(s.sharded[i], 0.1);
      expected.mul_(0.9).add_(s.plain[i], 0.1);
      EXPECT_TRUE(at::allclose(whole(average), expected));
    }
    auto other = torch::zeros({2, 3}, at::kDouble);
    expect_refused([&] { other.add_(s.sharded[0]); }, {"aten::add_", "'p0'", "other sizes"});
    auto base = torch::zeros({6, 3}, at::kDouble);
    auto view = base.narrow(0, 0, 5);
    expect_refused([&] { view.add_(s.sharded[0]); }, {"aten::add_", "'p0'", "shares its memory"});
  });
}

TEST(OutsideThreads, NewTensorsArePlain) {
  on_ranks([&](int) {
    Sharded s({{5, 3}});
    at::NoGradGuard no_grad;
    EXPECT_FALSE(is_dtensor(s.sharded[0].new_zeros({4})));
    EXPECT_EQ(s.sharded[0].new_zeros({4}).scalar_type(), at::kDouble);
    EXPECT_EQ(torch::ones({2}).to(s.sharded[0]).scalar_type(), at::kDouble);
  });
}

}  // namespace
}  // namespace fsdp::testing
