#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fsdp/fsdp.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "support/ranks.h"

// What the tests of this folder share: each case is a small recipe that stock FSDP gets wrong or refuses, run by a
// plain model and by a sharded one (docs/cases.md lists them).
namespace fsdp::testing {

using Values = std::vector<at::Tensor>;
using Forward = std::function<at::Tensor(const at::Tensor&)>;

/// Linear without bias, all weights 1.
torch::nn::Linear ones_linear(int64_t in, int64_t out);

/// The whole of a sharded tensor (collective), a copy of any other; undefined stays undefined.
at::Tensor whole(const at::Tensor& tensor);

/// All parameters, then all gradients, of a plain or sharded module.
Values parameters_and_gradients(const torch::nn::Module& module);

void expect_equal(const Values& actual, const Values& expected, const std::string& where, double tolerance = 1e-5);

/// Runs `body(rank)` as run_ranks does and returns what each rank threw, "" for nothing.
std::vector<std::string> errors_of(int ranks, const std::function<void(int rank)>& body,
                                   std::chrono::milliseconds timeout = std::chrono::seconds(20));

/// Every rank threw, before the timeout of its collectives, a message with all of `words`.
void expect_every_rank_says(const std::vector<std::string>& errors, const std::vector<std::string>& words);

/// What `body` throws, "" if nothing.
std::string error_of(const std::function<void()>& body);

/// One way to run a model: plain (no handle), or sharded as one rank.
template <class M>
struct Side {
  M& net;
  Forward forward;
  FSDPModule<M>* handle = nullptr;
  int rank = 0;
};

/// A model and a body to be run plain and on two ranks, which both see the same data, so that averaged gradients
/// equal the plain ones.
template <class M>
struct Recipe {
  std::function<M()> make;
  std::function<Values(Side<M>&)> body;
  std::function<FSDPModule<M>(M&, const DeviceMesh&)> shard = [](M& net, const DeviceMesh& mesh) {
    return fully_shard(net, {.mesh = mesh});
  };
  double tolerance = 1e-5;
};

/// Runs `recipe` plain and sharded and expects the same values.
template <class M>
void expect_like_plain(const Recipe<M>& recipe) {
  const int ranks = 2;
  // The default generator is the process's: models are made by one thread.
  std::vector<M> nets;
  for (int i = 0; i <= ranks; ++i) {
    torch::manual_seed(0);
    nets.push_back(recipe.make());
  }
  auto& plain = nets.back();
  Side<M> plain_run{plain, [&](const at::Tensor& x) { return plain->forward(x); }};
  Values expected;
  for (const auto& value : recipe.body(plain_run)) expected.push_back(whole(value));
  run_ranks(ranks, [&](int rank) {
    auto& net = nets[static_cast<size_t>(rank)];
    auto handle = recipe.shard(net, init_device_mesh(at::kCPU, {ranks}, {"dp"}));
    Side<M> run{net, [&](const at::Tensor& x) { return handle(x); }, &handle, rank};
    Values actual;
    for (const auto& value : recipe.body(run)) actual.push_back(whole(value));
    expect_equal(actual, expected, "rank " + std::to_string(rank), recipe.tolerance);
  });
}

/// A model whose ranks do different things: the right gradient is the mean over ranks of what each alone would get,
/// and absent only where no rank has one.
template <class M>
struct Uneven {
  std::function<M()> make;
  std::function<at::Tensor(M& net, const Forward& forward, int rank, int step)> loss;
  std::function<FSDPModule<M>(M&, const DeviceMesh&)> shard = [](M& net, const DeviceMesh& mesh) {
    return fully_shard(net, {.mesh = mesh});
  };
  int ranks = 2;
  int steps = 4;  // the first records the order of gathers, the others follow it
};

template <class M>
void expect_mean_of_ranks(const Uneven<M>& c) {
  std::vector<M> nets;
  for (int i = 0; i <= c.ranks; ++i) {
    torch::manual_seed(0);
    nets.push_back(c.make());
  }
  auto& plain = nets.back();
  const auto descend = [](torch::nn::Module& net) {
    at::NoGradGuard no_grad;
    for (auto& p : net.parameters()) {
      if (p.grad().defined()) p.sub_(p.grad(), 0.1);
    }
  };
  std::vector<Values> expected;
  for (int step = 0; step < c.steps; ++step) {
    Values mean(plain->parameters().size());
    for (int rank = 0; rank < c.ranks; ++rank) {
      plain->zero_grad();
      c.loss(
           plain, [&](const at::Tensor& x) { return plain->forward(x); }, rank, step)
          .backward();
      for (size_t i = 0; i < mean.size(); ++i) {
        const auto& gradient = plain->parameters()[i].grad();
        if (!gradient.defined()) continue;
        mean[i] = mean[i].defined() ? mean[i] + gradient / c.ranks : gradient / c.ranks;
      }
    }
    for (size_t i = 0; i < mean.size(); ++i) plain->parameters()[i].mutable_grad() = mean[i];
    expected.push_back(mean);
    descend(*plain);
  }
  run_ranks(c.ranks, [&](int rank) {
    auto& net = nets[static_cast<size_t>(rank)];
    auto handle = c.shard(net, init_device_mesh(at::kCPU, {c.ranks}, {"dp"}));
    for (int step = 0; step < c.steps; ++step) {
      net->zero_grad();
      c.loss(
           net, [&](const at::Tensor& x) { return handle(x); }, rank, step)
          .backward();
      Values actual;
      for (const auto& p : net->parameters()) actual.push_back(whole(p.grad()));
      expect_equal(actual, expected[static_cast<size_t>(step)],
                   "rank " + std::to_string(rank) + ", step " + std::to_string(step));
      descend(*net);
    }
  });
}

/// `blocks` Linear layers with tanh between them and a head: each block is its own group where `shard_blocks` is used.
struct StackImpl : torch::nn::Module {
  explicit StackImpl(int64_t blocks = 3, int64_t width = 6);
  at::Tensor forward(at::Tensor x);

  torch::nn::ModuleList blocks{nullptr};
  torch::nn::Linear head{nullptr};
  /// Runs before block `i`; may throw.
  std::function<void(size_t i)> before_block;
  /// Blocks to run; empty: all.
  std::vector<size_t> route;
};
TORCH_MODULE(Stack);

FSDPModule<Stack> shard_blocks(Stack& net, const DeviceMesh& mesh);

}  // namespace fsdp::testing
