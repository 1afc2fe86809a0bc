// One rank of a C++ side: plain, or sharded by libfsdp. Serves the driver's commands (see ../README.md, "Protocol").
#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <fsdp/device_mesh.h>
#include <fsdp/distributed.h>
#include <fsdp/dtensor.h>
#include <fsdp/error.h>
#include <fsdp/fully_shard.h>
#include <fsdp/optim.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "models.h"

namespace {

using nlohmann::json;

struct Config {
  std::string side = "plain";
  std::string model = "block";
  std::string engine = "gloo";
  int64_t width = 16;
  int64_t rows = 16;
  int64_t columns = 1;
  int64_t layers = 24;
  int64_t batch = 2;
  int64_t seq = 8;
  int rank = 0;
  int world = 1;
  bool time_zero_grad = false;
  std::string adamw;  // "": none
  bool time_adamw = false;
};

void parse(CLI::App& app, Config& config) {
  app.add_option("--side", config.side)->required()->check(CLI::IsMember({"plain", "sharded", "inplace"}));
  app.add_option("--model", config.model)->check(CLI::IsMember({"block", "rows"}));
  app.add_option("--engine", config.engine)->check(CLI::IsMember({"fake", "gloo", "mpi", "shm"}));
  app.add_option("--width", config.width);
  app.add_option("--rows", config.rows);
  app.add_option("--columns", config.columns);
  app.add_option("--layers", config.layers);
  app.add_option("--batch", config.batch);
  app.add_option("--seq", config.seq);
  app.add_option("--rank", config.rank);
  app.add_option("--world", config.world);
  app.add_flag("--time-zero-grad", config.time_zero_grad);
  app.add_option("--adamw", config.adamw, "step an AdamW after each backward, outside the timed part")
      ->check(CLI::IsMember({"default", "fused"}));
  app.add_flag("--time-adamw", config.time_adamw, "inside of it");
}

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// A line of a file of /proc/self, in MB.
double process_mb(const char* file, const std::string& field) {
  std::ifstream status(std::string("/proc/self/") + file);
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field + ":", 0) == 0) return std::stod(line.substr(field.size() + 1)) / 1024;
  }
  return 0;
}

double status_mb(const std::string& field) { return process_mb("status", field); }

/// Makes VmHWM start over, where the kernel allows it.
void reset_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

std::shared_ptr<bench::Stack> make_model(const Config& config) {
  torch::manual_seed(0);
  auto stack = std::make_shared<bench::Stack>();
  for (int64_t i = 0; i < config.layers; ++i) {
    if (config.model == "rows") {
      stack->push_back(std::make_shared<bench::Rows>(config.rows, config.columns));
    } else {
      stack->push_back(std::make_shared<bench::Block>(config.width));
    }
  }
  return stack;
}

torch::Tensor make_input(const Config& config, int rank) {
  torch::manual_seed(1000 + rank);
  if (config.model == "rows") return torch::randn({config.rows, config.columns});
  return torch::randn({config.batch, config.seq, config.width});
}

class Side {
 public:
  explicit Side(const Config& config) : config_(config), base_mb_(status_mb("VmRSS")) {
    auto model = make_model(config);
    if (config.engine == "mpi") {
      fsdp::init_process_group({.engine = config.engine});
      config_.rank = fsdp::rank();
    } else if (config.world > 1) {
      fsdp::init_process_group({.engine = config.engine, .rank = config.rank, .world_size = config.world});
    }
    const double begin = now_us();
    forward_ = config.side != "plain" ? shard(model) : [model](const torch::Tensor& x) { return model->forward(x); };
    setup_us_ = now_us() - begin;
    parameters_ = model->parameters();
    const torch::optim::AdamWOptions options(1e-4);
    if (config.adamw == "fused") {
      optimizer_ = std::make_unique<fsdp::optim::AdamW>(parameters_, options);
    } else if (config.adamw == "default") {
      optimizer_ = std::make_unique<torch::optim::AdamW>(parameters_, options);
    }
    input_ = make_input(config, config_.rank);
    build_peak_mb_ = status_mb("VmHWM");
    reset_peak();
  }

  json ready() const {
    int64_t elements = 0;
    for (const auto& p : parameters_) elements += p.numel();
    return {{"ready", true},         {"torch", TORCH_VERSION}, {"threads", at::get_num_threads()},
            {"setup_us", setup_us_}, {"mesh_us", mesh_us_},    {"parameters", elements}};
  }

  json answer(const std::string& line) {
    std::istringstream words(line);
    std::string command;
    words >> command;
    if (command == "round") {
      int warmup = 0, steps = 0;
      words >> warmup >> steps;
      return round(warmup, steps);
    }
    if (command == "learn") {
      int steps = 0;
      words >> steps;
      return learn(steps);
    }
    if (command == "check") return check();
    if (command == "memory") return memory();
    throw fsdp::InvalidArgument("unknown command '" + line + "'");
  }

 private:
  using Forward = std::function<torch::Tensor(const torch::Tensor&)>;

  Forward shard(const std::shared_ptr<bench::Stack>& model) {
    const double begin = now_us();
    const auto mesh = fsdp::init_device_mesh(torch::kCPU, {config_.world}, {"dp"});
    mesh_us_ = now_us() - begin;
    std::vector<fsdp::FSDPModuleBase> groups;
    for (const auto& layer : model->layers) groups.push_back(fsdp::fully_shard(layer, {.mesh = mesh}));
    const auto root = fsdp::fully_shard(model, {.mesh = mesh});
    if (config_.side == "inplace") {
      for (auto& group : groups) group.set_symm_mem_for_comm();
    }
    return root;
  }

  torch::Tensor loss(const torch::Tensor& x) const { return forward_(x).square().mean(); }

  void zero_grad() {
    for (auto& p : parameters_) p.mutable_grad().reset();
  }

  struct Times {
    double forward_us, total_us, optimizer_us;
  };

  Times step() {
    if (config_.engine != "fake" && config_.world > 1) fsdp::barrier();
    const double begin = now_us();
    auto value = loss(input_);
    const double forward = now_us();
    value.backward();
    double end = now_us();
    if (optimizer_) optimizer_->step();
    const double stepped = now_us(), optimizer = stepped - end;
    if (config_.time_adamw) end = stepped;
    zero_grad();
    if (config_.time_zero_grad) end = now_us() - (config_.time_adamw ? 0 : optimizer);
    return {forward - begin, end - begin, optimizer};
  }

  json round(int warmup, int steps) {
    for (int i = 0; i < warmup; ++i) step();
    std::vector<double> forward_us, us, optimizer_us;
    for (int i = 0; i < steps; ++i) {
      const auto times = step();
      forward_us.push_back(times.forward_us);
      us.push_back(times.total_us);
      optimizer_us.push_back(times.optimizer_us);
    }
    return {{"forward_us", forward_us}, {"us", us}, {"optimizer_us", optimizer_us}};
  }

  /// Backward of the mean over all ranks' inputs; plain does them all itself. The loss of this rank's, or of them all.
  double gradients() {
    const bool plain = config_.side == "plain";
    const int first = plain ? 0 : config_.rank, last = plain ? config_.world : config_.rank + 1;
    double sum = 0;
    for (int rank = first; rank < last; ++rank) {
      auto value = loss(make_input(config_, rank));
      (value / (last - first)).backward();
      sum += value.item<double>();
    }
    return sum / (last - first);
  }

  /// Steps the optimizer with the gradients of the mean over all ranks' inputs.
  json learn(int steps) {
    for (int i = 0; i < steps; ++i) {
      gradients();
      optimizer_->step();
      zero_grad();
    }
    return json::object();
  }

  /// The loss of this rank's input and the norms of the ranks' mean gradients.
  json check() {
    const double value = gradients();
    std::vector<double> norms;
    for (const auto& p : parameters_) {
      const auto& grad = p.grad();
      const auto whole = fsdp::is_dtensor(grad) ? fsdp::dtensor(grad).full_tensor() : grad;
      norms.push_back(whole.to(torch::kDouble).norm().item<double>());
    }
    zero_grad();
    return {{"loss", value}, {"grad_norms", norms}};
  }

  json memory() {
    return {{"base_mb", base_mb_},
            {"build_peak_mb", build_peak_mb_},
            {"peak_mb", status_mb("VmHWM")},
            {"pss_mb", pss_of_a_step()}};
  }

  /// This process's share of the memory that is its own or shared, at its largest in a step.
  double pss_of_a_step() {
    std::atomic<bool> over = false;
    double peak = 0;
    std::thread sampler([&] {
      for (; !over; std::this_thread::sleep_for(std::chrono::milliseconds(20))) {
        peak = std::max(peak, process_mb("smaps_rollup", "Pss"));
      }
    });
    step();
    over = true;
    sampler.join();
    return peak;
  }

  Config config_;
  double base_mb_, build_peak_mb_ = 0, setup_us_ = 0, mesh_us_ = 0;
  Forward forward_;
  std::vector<torch::Tensor> parameters_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
  torch::Tensor input_;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("One rank of a measured C++ side");
  Config config;
  parse(app, config);
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  // Fake gathers leave whatever was in memory; arithmetic on denormals would be timed with the host's work.
  at::globalContext().setFlushDenormal(config.engine == "fake");
  {
    Side side(config);
    std::cout << side.ready() << std::endl;
    for (std::string line; std::getline(std::cin, line);) std::cout << side.answer(line) << std::endl;
  }
  fsdp::destroy_process_group();
  return 0;
}
