#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fsdp/fsdp.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "engine/context.h"
#include "module/module_state.h"

namespace fsdp::testing {

/// A model under test: one tensor in, one out. Not a template, so that a test costs no instantiation of its own.
struct Net : torch::nn::Module {
  virtual at::Tensor forward(const at::Tensor& x) = 0;
};
using NetPtr = std::shared_ptr<Net>;
using Handle = FSDPModule<NetPtr>;

enum class Grouping {
  kOne,       // the root's group alone
  kChildren,  // one group a child that has parameters, and the root's for the rest
};

/// What is trained plain and sharded, and how the two are compared.
struct Case {
  std::function<NetPtr()> make;
  at::Tensor batch;  // samples along dim 0, cut over the ranks
  /// Every rank gets the whole batch (batch norm's statistics depend on it).
  bool same_data = false;
  /// The plain run works on each rank's samples apart and takes the mean: where what a model does depends on them.
  bool apart = false;
  std::function<at::Tensor(const at::Tensor& out)> loss = [](const at::Tensor& out) { return out.pow(2).mean(); };
  /// Replaces Grouping::kChildren.
  std::function<void(Net& net, const FullyShardOptions& options)> shard_parts;
  /// Replaces fully_shard of parts and whole; `options` and `mesh_shape` are then its own business.
  std::function<Handle(const NetPtr& net, Grouping grouping)> wrap;
  /// Of every group; the mesh is 1D over all ranks where none is given here.
  FullyShardOptions options{};
  std::vector<int64_t> mesh_shape{};
  std::function<void(Handle& model)> configure = [](Handle&) {};
  at::ScalarType dtype = at::kDouble;
  double tolerance = 1e-9;  // relative to the largest value of a tensor
  int steps = 3;
};

/// make() with the same random draws in every thread.
NetPtr build(const Case& c);

/// The plain model and the sharded one on this rank, fed alike.
class Twin {
 public:
  /// Collective, inside run_ranks or a process body.
  Twin(const Case& c, Grouping grouping);

  Net& plain() { return *plain_; }
  Net& net() { return *net_; }
  Handle& model() { return *model_; }
  engine::Context& context() { return model_->state()->context(); }
  const Case& the_case() const { return c_; }

  /// The plain loss on the joined `batch`.
  at::Tensor plain_loss(const at::Tensor& batch);
  at::Tensor plain_loss() { return plain_loss(c_.batch); }
  /// This rank's loss on its samples of `batch`.
  at::Tensor sharded_loss(const at::Tensor& batch);
  at::Tensor sharded_loss() { return sharded_loss(c_.batch); }
  at::Tensor samples_here(const at::Tensor& batch) const;

  void zero_grad();
  void optimizer_step();
  /// Forward, backward and AdamW on both; expects equal losses and gradients.
  void train_step(const at::Tensor& batch);
  void train_step() { train_step(c_.batch); }

  /// The mean of the sharded losses over the ranks against the plain loss. Collective.
  void expect_equal_losses(const at::Tensor& plain, const at::Tensor& sharded);
  void expect_equal_parameters();
  void expect_equal_gradients();

 private:
  Case c_;
  NetPtr plain_, net_;
  std::unique_ptr<Handle> model_;
  std::unique_ptr<torch::optim::AdamW> plain_optimizer_, optimizer_;
};

/// The largest difference, relative to the largest value of `expected`.
double difference(const at::Tensor& got, const at::Tensor& expected);

/// Runs `body` on `ranks` threads with one Twin each.
void run_twins(int ranks, const Case& c, Grouping grouping, const std::function<void(Twin& twin, int rank)>& body);

/// c.steps training steps on `ranks` threads, with each grouping; loss, gradients and parameters equal to plain.
void expect_parity(int ranks, const Case& c);
void expect_parity(int ranks, const Case& c, Grouping grouping);
/// The same on this rank of a group that exists already.
void expect_parity_here(const Case& c, Grouping grouping);

/// fully_shard of each child that has parameters.
void shard_children(torch::nn::Module& net, const FullyShardOptions& options);

/// Suites that run on 1, 2, 3 and 5 ranks.
struct OnRanks : ::testing::TestWithParam<int> {
  int ranks() const { return GetParam(); }
};
#define FSDP_ON_RANKS(Suite, ...) \
  INSTANTIATE_TEST_SUITE_P(Ranks, Suite, ::testing::Values(__VA_ARGS__), ::testing::PrintToStringParamName())

/// A batch of `samples` with values that differ everywhere, in [-1, 1].
at::Tensor ramp(std::vector<int64_t> sizes);

}  // namespace fsdp::testing
