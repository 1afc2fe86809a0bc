// Two optimizer steps of a small sharded model in both styles, on one rank without a launcher.
#include <iostream>

#include <fsdp/fsdp.h>
#include <torch/torch.h>

template <class Model>
bool trains(const char* style, const Model& model) {
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
    losses.push_back(loss.template item<double>());
  }
  std::cout << "fsdp " << FSDP_VERSION << ", " << style << ": loss " << losses[0] << ", then " << losses[1] << "\n";
  return losses[1] < losses[0];
}

torch::nn::Sequential net() {
  return torch::nn::Sequential(torch::nn::Linear(4, 16), torch::nn::ReLU(), torch::nn::Linear(16, 1));
}

int main() {
  torch::manual_seed(0);
  fsdp::init_process_group();
  const auto mesh = fsdp::init_device_mesh(torch::kCPU, {fsdp::world_size()}, {"dp"});
  bool ok = trains("fully_shard", fsdp::fully_shard(net(), {.mesh = mesh}));
  const fsdp::FullyShardedDataParallel classic(
      net(), {.mesh = mesh, .auto_wrap_policy = fsdp::module_wrap_policy<torch::nn::Linear>()});
  ok = trains("the classic wrapper", classic) && ok;
  {
    const auto whole = classic.summon_full_params();
    ok = !fsdp::is_dtensor(classic->parameters()[0]) && ok;
  }
  fsdp::destroy_process_group();
  return ok ? 0 : 1;
}
