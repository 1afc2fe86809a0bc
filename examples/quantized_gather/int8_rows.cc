// Weights that travel in 8 bits: shards, gradients and optimizer states are float32, gathers move a quarter of the
// bytes.
//
//     torchrun --no-python --nproc-per-node 2 build/release/examples/quantized_gather/int8_rows
#include <iostream>
#include <memory>

#include <fsdp/fsdp.h>
#include <torch/torch.h>

/// What gathers of a matrix move: 8-bit rows, and a scale for each.
struct Int8Rows : fsdp::TensorExtension {
  std::vector<at::Tensor> pre_all_gather(const at::Tensor& rows) override {
    const auto scales = rows.abs().amax({1}, /*keepdim=*/true).clamp_min(1e-12) / 127;
    return {(rows / scales).round().to(torch::kInt8), scales};
  }
  void post_all_gather(const std::vector<at::Tensor>& sent, const at::Tensor& rows) override {
    rows.copy_(sent[0] * sent[1]);
  }
};

int main() {
  fsdp::init_process_group();
  torch::manual_seed(0);
  torch::nn::Sequential net;
  for (int i = 0; i < 4; ++i) {
    net->push_back(torch::nn::Linear(64, 64));
    net->push_back(torch::nn::GELU());
  }
  fsdp::FullyShardOptions options;
  options.mesh = fsdp::init_device_mesh(torch::kCPU, {fsdp::world_size()}, {"dp"});
  options.tensor_extension_fn = [](const at::Tensor& parameter) -> std::shared_ptr<fsdp::TensorExtension> {
    return parameter.dim() == 2 ? std::make_shared<Int8Rows>() : nullptr;
  };
  for (const auto& layer : *net) {
    if (!layer.ptr()->parameters().empty()) fsdp::fully_shard(layer.ptr(), options);
  }
  auto model = fsdp::fully_shard(net, options);
  torch::optim::AdamW optimizer(model->parameters(), 1e-2);

  torch::manual_seed(fsdp::rank() + 1);
  const auto x = torch::randn({256, 64});
  for (int step = 1; step <= 20; ++step) {
    const auto loss = (model(x) - x.roll(1, 1)).square().mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    if (fsdp::rank() == 0 && step % 5 == 0) std::cout << "step " << step << ": loss " << loss.item<float>() << "\n";
  }
  fsdp::destroy_process_group();
}
