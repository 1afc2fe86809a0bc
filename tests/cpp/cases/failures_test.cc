// Row 18: a rank that throws. The others hear of it at their next meeting, and after reset_iter_state() on every rank
// training goes on as if the step had not been tried.
#include "cases.h"
#include "support/processes.h"

namespace fsdp::testing {
namespace {

using std::chrono::seconds;

enum class Where { kForward, kBackward, kLoss };

struct Failure {
  Where where;
  int good_steps;  // before the failing one: 0 fails while the order of gathers is being recorded
  bool both;       // or rank 1 alone
};

std::string name_of(const ::testing::TestParamInfo<Failure>& info) {
  const auto& f = info.param;
  return std::string(f.where == Where::kForward    ? "InForward"
                     : f.where == Where::kBackward ? "InBackward"
                                                   : "InTheLoss") +
         (f.good_steps ? "Later" : "First") + (f.both ? "OnBoth" : "");
}

at::Tensor input() { return at::linspace(-1, 1, 12).view({2, 6}); }

void train_step(torch::optim::Optimizer& optimizer, const Forward& forward) {
  optimizer.zero_grad();
  forward(input()).pow(2).mean().backward();
  optimizer.step();
}

Stack make_net() {
  Stack net;
  at::NoGradGuard no_grad;
  for (auto& p : net->parameters()) p.copy_(at::linspace(-0.5, 0.5, p.numel()).view(p.sizes()));
  return net;
}

/// One rank's part; both ranks' parameters must end as those of a plain run of the good steps.
void fail_and_recover(int rank, const Failure& failure) {
  auto plain = make_net();
  torch::optim::SGD plain_optimizer(plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int i = 0; i < failure.good_steps + 2; ++i) {
    train_step(plain_optimizer, [&](const at::Tensor& x) { return plain->forward(x); });
  }

  auto net = make_net();
  auto model = shard_blocks(net, {});
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const Forward forward = [&](const at::Tensor& x) { return model(x); };
  for (int i = 0; i < failure.good_steps; ++i) train_step(optimizer, forward);

  const bool fails = failure.both || rank == 1;
  optimizer.zero_grad();
  const auto begin = std::chrono::steady_clock::now();
  std::string what;
  try {
    net->before_block = [&](size_t i) {
      if (fails && failure.where == Where::kForward && i == 1) throw std::logic_error("boom in forward");
    };
    auto hidden = input().requires_grad_();
    if (fails && failure.where == Where::kBackward) {
      net->blocks->ptr<torch::nn::LinearImpl>(1)->weight.register_hook(
          [](const at::Tensor&) -> at::Tensor { throw std::logic_error("boom in a hook"); });
    }
    auto loss = model(hidden).pow(2).mean();
    if (fails && failure.where == Where::kLoss) throw std::logic_error("boom in the loss");
    loss.backward();
    ADD_FAILURE() << "rank " << rank << " saw no error";
  } catch (const CommError& error) {
    what = error.what();
    EXPECT_FALSE(fails) << what;
    EXPECT_NE(what.find("rank 1 gave up"), std::string::npos) << what;
    if (failure.where == Where::kForward) {
      EXPECT_NE(what.find("boom in forward"), std::string::npos) << what;
      EXPECT_NE(what.find("group 'blocks.0'"), std::string::npos) << what;
    }
    EXPECT_NE(what.find("reset_iter_state()"), std::string::npos) << what;
  } catch (const std::exception& error) {
    what = error.what();
    EXPECT_TRUE(fails) << what;
    EXPECT_NE(what.find("boom"), std::string::npos) << what;
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(10));
  net->before_block = nullptr;
  for (const auto& p : net->parameters()) EXPECT_FALSE(p.grad().defined());
  if (fails && failure.where != Where::kLoss) {
    // Until it is reset the model refuses, on its own and at once.
    EXPECT_NE(error_of([&] { model(input()); }).find("reset_iter_state()"), std::string::npos);
  }
  if (failure.where == Where::kBackward && fails) net->blocks->ptr<torch::nn::LinearImpl>(1)->weight.remove_hook(0);

  model.reset_iter_state();
  for (int i = 0; i < 2; ++i) train_step(optimizer, forward);
  Values actual, expected;
  for (const auto& p : net->parameters()) actual.push_back(whole(p));
  for (const auto& p : plain->parameters()) expected.push_back(whole(p));
  expect_equal(actual, expected, "rank " + std::to_string(rank));
}

const std::vector<Failure>& failures() {
  static const auto all = [] {
    std::vector<Failure> list;
    for (const auto where : {Where::kForward, Where::kBackward, Where::kLoss}) {
      for (const int good_steps : {0, 2}) {
        for (const bool both : {false, true}) list.push_back({where, good_steps, both});
      }
    }
    return list;
  }();
  return all;
}

struct FailureThreads : ::testing::TestWithParam<Failure> {};
TEST_P(FailureThreads, Row18) {
  run_ranks(
      2, [](int rank) { fail_and_recover(rank, GetParam()); }, seconds(30));
}
INSTANTIATE_TEST_SUITE_P(All, FailureThreads, ::testing::ValuesIn(failures()), name_of);

FSDP_PROCESS_BODY(cases_row_18) {
  init_process_group({.timeout = seconds(30)});
  for (const auto& failure : failures()) fail_and_recover(rank(), failure);
  destroy_process_group();
}
TEST(FailureProcs, Row18) { run_processes(2, "cases_row_18"); }

}  // namespace
}  // namespace fsdp::testing
