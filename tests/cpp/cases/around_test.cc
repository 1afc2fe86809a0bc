// Ways around the sharded tensor: each works as it does on a plain module, or throws with what to call.
#include <sstream>

#include "cases.h"
#include "support/processes.h"

namespace fsdp::testing {
namespace {

using torch::nn::Linear;

void expect_contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
}

/// Each is refused with these words in grad mode and under no_grad, and leaves the model as it was.
void expect_refused(const std::function<void(Linear&)>& act, const std::vector<std::string>& words) {
  run_ranks(2, [&](int) {
    Linear net = ones_linear(4, 6);
    auto model = fully_shard(net);
    for (const bool grad_mode : {true, false}) {
      at::AutoGradMode mode(grad_mode);
      expect_contains(error_of([&] { act(net); }), words);
    }
    EXPECT_TRUE(is_dtensor(net->weight));
    EXPECT_EQ(net->weight.sizes(), (std::vector<int64_t>{6, 4}));
    EXPECT_EQ(net->weight.scalar_type(), at::kFloat);
    const auto y = model(at::ones({1, 4}));
    EXPECT_EQ(y.sum().item<double>(), 24);
    y.sum().backward();
    EXPECT_TRUE(at::equal(whole(net->weight.grad()), at::ones({6, 4})));
  });
}

TEST(AroundThreads, ModuleToAnotherDtype) {
  expect_refused([](auto& net) { net->to(at::kBFloat16); }, {"'weight'", "before fully_shard"});
  expect_refused([](auto& net) { net->to(at::kDouble, /*non_blocking=*/true); }, {"'weight'", "before fully_shard"});
  expect_refused([](auto& net) { net->to(at::Device(at::kMeta)); }, {"'weight'", "before fully_shard"});
}

TEST(AroundThreads, ModuleToWhatItIs) {
  run_ranks(2, [](int) {
    Linear net = ones_linear(4, 6);
    auto model = fully_shard(net);
    net->to(at::kFloat);
    net->to(at::Device(at::kCPU));
    net->to(at::Device(at::kCPU), at::kFloat);
    net->train();
    net->eval();
    EXPECT_EQ(model(at::ones({1, 4})).sum().item<double>(), 24);
  });
}

TEST(AroundThreads, DataIsNotReplaced) {
  expect_refused([](auto& net) { net->weight.set_data(at::zeros({6, 4})); }, {"'weight'", "copy_()", "fsdp::load"});
  expect_refused([](auto& net) { at::zeros({6, 4}).set_data(net->weight); }, {"'weight'"});
  expect_refused([](auto& net) { net->weight.set_(at::zeros({6, 4})); }, {"'weight'", "full_tensor()"});
  expect_refused([](auto& net) { net->weight.resize_({2, 2}); }, {"'weight'", "full_tensor()"});
  expect_refused([](auto& net) { net->weight.detach().resize_({2, 2}); }, {"'weight'"});
  expect_refused([](auto& net) { net->weight.transpose_(0, 1); }, {"'weight'"});
  expect_refused([](auto& net) { net->weight.detach().t_(); }, {"'weight'"});
  expect_refused([](auto& net) { net->weight.detach().resize_as_(at::ones({2, 2})); }, {"'weight'"});
  expect_refused([](auto& net) { at::empty({2, 2}).set_(net->weight); }, {"'weight'"});
}

TEST(AroundThreads, TorchsArchives) {
  expect_refused(
      [](auto& net) {
        std::ostringstream out;
        torch::save(net, out);
      },
      {"'weight'", "fsdp::save"});
  expect_refused(
      [](auto& net) {
        std::ostringstream out;
        torch::save(net->weight, out);
      },
      {"'weight'", "fsdp::save"});
  std::ostringstream file;
  torch::save(ones_linear(4, 6), file);
  expect_refused(
      [&](auto& net) {
        std::istringstream in(file.str());
        torch::load(net, in);
      },
      {"'weight'", "fsdp::load"});
  expect_refused(
      [](auto& net) {
        std::ostringstream out;
        torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        net->weight.mutable_grad() = at::zeros_like(net->weight.detach());
        optimizer.step();
        net->weight.mutable_grad().reset();
        torch::save(optimizer, out);
      },
      {"'weight'", "fsdp::save"});
}

// Values that come from the user: whole tensors are cut, and so are the rows of an ordinary one.
TEST(AroundThreads, CopyInUnderNoGrad) {
  run_ranks(2, [](int) {
    Linear net = ones_linear(3, 5);
    auto model = fully_shard(net);
    const auto values = at::arange(15, at::kFloat).view({5, 3});
    {
      at::NoGradGuard no_grad;
      net->weight.copy_(values);
    }
    EXPECT_TRUE(at::equal(whole(net->weight), values));
    EXPECT_TRUE(at::equal(model(at::eye(3)).detach(), values.t()));
    EXPECT_NE(error_of([&] { net->weight.copy_(values); }), "");  // a leaf in grad mode: refused by plain torch too
  });
}

using Init = std::function<void(const at::Tensor&)>;

std::vector<std::pair<std::string, Init>> inits() {
  namespace init = torch::nn::init;
  return {{"constant_", [](const at::Tensor& p) { init::constant_(p, 3); }},
          {"zeros_", [](const at::Tensor& p) { init::zeros_(p); }},
          {"ones_", [](const at::Tensor& p) { init::ones_(p); }},
          {"uniform_", [](const at::Tensor& p) { init::uniform_(p, -1, 1); }},
          {"normal_", [](const at::Tensor& p) { init::normal_(p, 1, 2); }},
          {"xavier_uniform_", [](const at::Tensor& p) { init::xavier_uniform_(p); }},
          {"xavier_normal_", [](const at::Tensor& p) { init::xavier_normal_(p); }},
          {"kaiming_uniform_", [](const at::Tensor& p) { init::kaiming_uniform_(p, std::sqrt(5)); }},
          {"kaiming_normal_", [](const at::Tensor& p) { init::kaiming_normal_(p); }},
          {"orthogonal_", [](const at::Tensor& p) { init::orthogonal_(p); }},
          {"eye_", [](const at::Tensor& p) { init::eye_(p); }},
          {"sparse_", [](const at::Tensor& p) { init::sparse_(p, 0.5); }},
          {"bernoulli_", [](const at::Tensor& p) {
             at::NoGradGuard g;
             p.bernoulli_(0.5);
           }}};
}

// On processes: the default generator is each rank's own, and equal seeds draw equal wholes.
FSDP_PROCESS_BODY(cases_inits) {
  init_process_group({.timeout = std::chrono::seconds(20)});
  for (const auto& [name, init] : inits()) {
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{5, 3}, {1, 7}, {4, 4}}) {
      auto plain = ones_linear(sizes[1], sizes[0]), net = ones_linear(sizes[1], sizes[0]);
      auto model = fully_shard(net);
      torch::manual_seed(7);
      init(plain->weight);
      torch::manual_seed(7);
      const auto what = error_of([&] { init(net->weight); });
      if (what.empty()) {
        EXPECT_TRUE(at::equal(whole(net->weight), plain->weight)) << name << " " << sizes;
        EXPECT_TRUE(at::equal(model(at::eye(sizes[1])).detach(), plain->weight.t())) << name << " " << sizes;
        // The next draw of every rank is plain's too.
        const auto next = at::rand({4});
        torch::manual_seed(7);
        init(plain->weight);
        EXPECT_TRUE(at::equal(next, at::rand({4}))) << name;
      } else {
        EXPECT_TRUE(name == "orthogonal_" || name == "eye_" || name == "sparse_") << name << ": " << what;
        expect_contains(what, {"'weight'", "copy_()"});
      }
    }
  }
  destroy_process_group();
}

TEST(AroundProcs, InitAfterSharding) { run_processes(2, "cases_inits"); }

}  // namespace
}  // namespace fsdp::testing
