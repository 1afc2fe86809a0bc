// A model on a device whose state is in host memory: what the C++ face shows, and what an optimizer steps.
#include <fsdp/fsdp.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "fake_device.h"
#include "mesh/world.h"

namespace fsdp::testing {
namespace {

using fake_device::kDevice;

TEST(OffloadDevice, TrainsAsOnTheHost) {
  fake_device::reset();
  mesh::World::set_thread_world(std::make_shared<mesh::World>("fake", nullptr, 0, 1, 0, std::chrono::seconds(10)));
  torch::manual_seed(3);
  torch::nn::Linear plain(5, 4), net(5, 4);
  {
    torch::NoGradGuard no_grad;
    net->weight.copy_(plain->weight), net->bias.copy_(plain->bias);
  }
  net->to(kDevice);
  FullyShardOptions options;
  options.mesh = init_device_mesh(kDevice.type(), {1});
  options.offload_policy = CPUOffloadPolicy{.pin_memory = false};
  auto model = fully_shard(net, options);
  torch::optim::AdamW optimizer(net->parameters(), 0.1), plain_optimizer(plain->parameters(), 0.1);
  const auto x = torch::arange(15, torch::kFloat).view({3, 5}) / 7;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad(), plain_optimizer.zero_grad();
    const auto out = model(x.to(kDevice));
    EXPECT_EQ(out.device(), kDevice);
    out.pow(2).sum().backward();
    plain(x).pow(2).sum().backward();
    for (const auto& item : net->named_parameters()) {
      EXPECT_TRUE(dtensor(item.value()).to_local().is_cpu()) << item.key();
      EXPECT_TRUE(dtensor(item.value().grad()).to_local().is_cpu()) << item.key();
      const auto& expected = plain->named_parameters()[item.key()];
      EXPECT_TRUE(torch::allclose(dtensor(item.value().grad()).full_tensor(), expected.grad())) << item.key();
    }
    EXPECT_NEAR(clip_grad_norm_(net->parameters(), 1e6).item<double>(),
                torch::nn::utils::clip_grad_norm_(plain->parameters(), 1e6), 1e-4);
    optimizer.step(), plain_optimizer.step();
  }
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(torch::allclose(dtensor(item.value()).full_tensor(), plain->named_parameters()[item.key()]));
  }
  mesh::World::set_thread_world(nullptr);
}

}  // namespace
}  // namespace fsdp::testing
