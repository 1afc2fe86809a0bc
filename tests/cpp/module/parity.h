#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fsdp/fsdp.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "support/ranks.h"

namespace fsdp::testing {

/// A model, its input and its loss, to be trained plain and sharded.
template <class M>
struct Case {
  std::function<M()> make;
  std::function<at::Tensor(M& model, const at::Tensor& x)> loss;  // for the plain run: model->forward
  at::Tensor batch;              // split over the ranks along dim 0, or given whole to each
  bool same_data = false;
  std::function<void(M& model, const DeviceMesh& mesh)> shard_parts = [](M&, const DeviceMesh&) {};
  int steps = 3;
  double tolerance = 2e-5;
};

inline double difference(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0) return 0;
  return ((a - b).abs().max() / (1e-6 + b.abs().max())).template item<double>();
}

/// Trains `c` plain on the joined batch and sharded on `ranks` threads, three AdamW steps each, and expects equal
/// losses and parameters.
template <class M>
void expect_parity(int ranks, const Case<M>& c,
                   const std::function<void(FSDPModule<M>&)>& configure = [](FSDPModule<M>&) {}) {
  using Options = torch::optim::AdamWOptions;
  torch::manual_seed(0);
  M plain = c.make();
  std::vector<M> models;
  for (int r = 0; r < ranks; ++r) {
    torch::manual_seed(0);
    models.push_back(c.make());
  }
  std::vector<double> losses;
  torch::optim::AdamW optimizer(plain->parameters(), Options(1e-2).weight_decay(0.1));
  for (int step = 0; step < c.steps; ++step) {
    auto loss = c.loss(plain, c.batch);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.template item<double>());
  }
  run_ranks(ranks, [&](int rank) {
    auto mesh = init_device_mesh(at::kCPU, {ranks}, {"dp"});
    auto& net = models[static_cast<size_t>(rank)];
    c.shard_parts(net, mesh);
    auto model = fully_shard(net, {.mesh = mesh});
    configure(model);
    torch::optim::AdamW sharded_optimizer(model->parameters(), Options(1e-2).weight_decay(0.1));
    const auto x = c.same_data ? c.batch : c.batch.chunk(ranks, 0)[static_cast<size_t>(rank)];
    for (int step = 0; step < c.steps; ++step) {
      // The loss runs inside the handle's scope, as a training module's forward would.
      module::ForwardScope scope(model.state());
      auto loss = c.loss(net, x);
      scope.complete();
      sharded_optimizer.zero_grad();
      loss.backward();
      sharded_optimizer.step();
      if (c.same_data || ranks == 1) {
        EXPECT_NEAR(loss.template item<double>(), losses[static_cast<size_t>(step)],
                    c.tolerance * (1 + std::abs(losses[static_cast<size_t>(step)])));
      }
    }
    const auto expected = plain->named_parameters();
    for (const auto& item : net->named_parameters()) {
      const auto& reference = expected[item.key()];
      ASSERT_EQ(item.value().sizes(), reference.sizes()) << item.key();
      const auto full = dtensor(item.value()).full_tensor();
      EXPECT_LT(difference(full, reference.detach()), c.tolerance) << item.key() << " rank " << rank;
      const auto& gradient = item.value().grad();
      ASSERT_EQ(gradient.defined(), reference.grad().defined()) << item.key();
      if (gradient.defined()) {
        EXPECT_LT(difference(dtensor(gradient).full_tensor(), reference.grad()), c.tolerance * 10) << item.key();
      }
    }
  });
}

}  // namespace fsdp::testing
