// Two optimizer steps of a small sharded model, on one rank without a launcher.
#include <iostream>

#include <fsdp/fsdp.h>
#include <torch/torch.h>

int main() {
  torch::manual_seed(0);
  fsdp::init_process_group();
  const auto mesh = fsdp::init_device_mesh(torch::kCPU, {fsdp::world_size()}, {"dp"});
  torch::nn::Sequential net(torch::nn::Linear(4, 16), torch::nn::ReLU(), torch::nn::Linear(16, 1));
  const auto model = fsdp::fully_shard(net, {.mesh = mesh});
  torch::optim::SGD optimizer(model->parameters(), 0.05);

  const auto x = torch::randn({32, 4});
  const auto y = x.sum(1, /*keepdim=*/true);
  std::vector<double> losses;
  for (int step = 0; step < 2; ++step) {
    const auto loss = torch::mse_loss(model(x), y);
    loss.backward();
    fsdp::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item<double>());
  }
  std::cout << "fsdp " << FSDP_VERSION << ": loss " << losses[0] << ", then " << losses[1] << "\n";
  fsdp::destroy_process_group();
  return losses[1] < losses[0] ? 0 : 1;
}
