#include "parity.h"

#include <cmath>
#include <mutex>

#include "support/ranks.h"

namespace fsdp::testing {

at::Tensor ramp(std::vector<int64_t> sizes) {
  int64_t numel = 1;
  for (auto size : sizes) numel *= size;
  // An irrational stride, so that no two rows are alike.
  return at::frac(torch::arange(numel, at::kDouble) * 0.6180339887).mul(2).sub(1).view(sizes);
}

NetPtr build(const Case& c) {
  static std::mutex mutex;  // threads share the default generator
  const std::lock_guard lock(mutex);
  torch::manual_seed(7);
  auto net = c.make();
  // Parameters that came with a dtype of their own keep it.
  if (c.dtype == at::kFloat) return net;
  at::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) {
    if (parameter.scalar_type() == at::kFloat) parameter.set_data(parameter.to(c.dtype));
  }
  for (auto& buffer : net->buffers()) {
    if (buffer.scalar_type() == at::kFloat) buffer.set_data(buffer.to(c.dtype));
  }
  return net;
}

void shard_children(torch::nn::Module& net, const FullyShardOptions& options) {
  for (auto& child : net.children()) {
    if (!child->parameters().empty()) fully_shard(child, options);
  }
}

double difference(const at::Tensor& got, const at::Tensor& expected) {
  if (expected.numel() == 0) return got.numel();
  const auto difference = (got.to(at::kDouble) - expected.to(at::kDouble)).abs().max();
  return (difference / (1e-6 + expected.to(at::kDouble).abs().max())).item<double>();
}

static Handle shard(const Case& c, const NetPtr& net, Grouping grouping) {
  auto options = c.options;
  if (!c.mesh_shape.empty()) {
    options.mesh = init_device_mesh(at::kCPU, c.mesh_shape);
  } else if (!options.mesh.defined()) {
    options.mesh = init_device_mesh(at::kCPU, {world_size()}, {"dp"});
  }
  if (grouping == Grouping::kChildren) {
    if (c.shard_parts) {
      c.shard_parts(*net, options);
    } else {
      shard_children(*net, options);
    }
  }
  return fully_shard(net, options);
}

Twin::Twin(const Case& c, Grouping grouping) : c_(c), plain_(build(c)), net_(build(c)) {
  c_.batch = c.batch.to(c.batch.is_floating_point() ? c.dtype : c.batch.scalar_type());
  model_ = std::make_unique<Handle>(c.wrap ? c.wrap(net_, grouping) : shard(c, net_, grouping));
  c.configure(*model_);
  // With the usual eps, the step of an element whose gradient is almost zero is the rounding of that gradient, blown
  // up.
  const auto adamw = torch::optim::AdamWOptions(1e-2).weight_decay(0.1).eps(1e-3);
  plain_optimizer_ = std::make_unique<torch::optim::AdamW>(plain_->parameters(), adamw);
  optimizer_ = std::make_unique<torch::optim::AdamW>(net_->parameters(), adamw);
}

at::Tensor Twin::samples_here(const at::Tensor& batch) const {
  return c_.same_data ? batch : batch.chunk(world_size(), 0)[static_cast<size_t>(rank())];
}

at::Tensor Twin::plain_loss(const at::Tensor& batch) {
  if (!c_.apart) return c_.loss(plain_->forward(batch));
  at::Tensor sum;
  for (const auto& samples : batch.chunk(world_size(), 0)) {
    const auto loss = c_.loss(plain_->forward(samples));
    sum = sum.defined() ? sum + loss : loss;
  }
  return sum / world_size();
}

at::Tensor Twin::sharded_loss(const at::Tensor& batch) { return c_.loss((*model_)(samples_here(batch))); }

void Twin::zero_grad() {
  plain_optimizer_->zero_grad();
  optimizer_->zero_grad();
}

void Twin::optimizer_step() {
  plain_optimizer_->step();
  optimizer_->step();
}

void Twin::train_step(const at::Tensor& batch) {
  zero_grad();
  const auto plain = plain_loss(batch);
  const auto sharded = sharded_loss(batch);
  expect_equal_losses(plain, sharded);
  plain.backward();
  sharded.backward();
  expect_equal_gradients();
  optimizer_step();
}

void Twin::expect_equal_losses(const at::Tensor& plain, const at::Tensor& sharded) {
  const auto mean = all_reduce_mean(sharded.detach().to(at::kDouble)).item<double>();
  const auto expected = plain.item<double>();
  EXPECT_NEAR(mean, expected, c_.tolerance * (1 + std::abs(expected))) << "loss, rank " << rank();
}

void Twin::expect_equal_parameters() {
  const auto expected = plain_->named_parameters();
  const auto got = net_->named_parameters();
  ASSERT_EQ(got.keys(), expected.keys());
  for (const auto& item : got) {
    const auto& reference = expected[item.key()];
    ASSERT_EQ(item.value().sizes(), reference.sizes()) << item.key();
    ASSERT_EQ(item.value().scalar_type(), reference.scalar_type()) << item.key();
    const auto& tensor = item.value();
    const auto full = is_dtensor(tensor) ? dtensor(tensor).full_tensor() : tensor.detach();
    EXPECT_LT(difference(full, reference.detach()), c_.tolerance) << item.key() << ", rank " << rank();
  }
}

void Twin::expect_equal_gradients() {
  const auto expected = plain_->named_parameters();
  for (const auto& item : net_->named_parameters()) {
    const auto& gradient = item.value().grad();
    const auto& reference = expected[item.key()].grad();
    // Collective below: all ranks see the same of both.
    ASSERT_EQ(gradient.defined(), reference.defined()) << "gradient of " << item.key() << ", rank " << rank();
    if (!gradient.defined()) continue;
    const auto full = is_dtensor(gradient) ? dtensor(gradient).full_tensor() : gradient;
    EXPECT_LT(difference(full, reference), 10 * c_.tolerance) << "gradient of " << item.key() << ", rank " << rank();
  }
}

void run_twins(int ranks, const Case& c, Grouping grouping, const std::function<void(Twin& twin, int rank)>& body) {
  try {
    run_ranks(
        ranks,
        [&](int rank) {
          SCOPED_TRACE(grouping == Grouping::kOne ? "one group" : "groups by child");
          Twin twin(c, grouping);
          body(twin, rank);
        },
        std::chrono::seconds(15));
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
}

void expect_parity_here(const Case& c, Grouping grouping) {
  Twin twin(c, grouping);
  for (int step = 0; step < c.steps; ++step) twin.train_step();
  twin.expect_equal_parameters();
}

void expect_parity(int ranks, const Case& c, Grouping grouping) {
  run_twins(ranks, c, grouping, [&](Twin& twin, int) {
    for (int step = 0; step < c.steps; ++step) twin.train_step();
    twin.expect_equal_parameters();
  });
}

void expect_parity(int ranks, const Case& c) {
  expect_parity(ranks, c, Grouping::kOne);
  expect_parity(ranks, c, Grouping::kChildren);
}

}  // namespace fsdp::testing
