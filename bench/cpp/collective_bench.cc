// One rank of a collective's timing: a channel of libfsdp's, or memory copied for comparison. Serves the driver's
// commands (see ../README.md, "Protocol"): `run <op> <bytes> <count>` answers the mean microseconds of `count` of them,
// one after the other, each with the ranks' parts of <bytes>. `run_own`: a gather's input is memory of the channel's,
// from which it sends without a copy; else a tensor as the engine makes them, in huge pages where the kernel gives
// them.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>

#include <ATen/Parallel.h>
#include <fsdp/device_mesh.h>
#include <fsdp/distributed.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/huge_pages.h"
#include "comm/channel.h"
#include "mesh/mesh_state.h"
#include "shard/segments.h"

namespace {

using nlohmann::json;

struct Config {
  std::string engine = "shm";
  int rank = -1, world = 2;
};

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void check(bool right, const std::string& what) {
  if (!right) throw std::runtime_error("wrong values: " + what);
}

/// Runs what `op` names `count` times over parts of `bytes`.
class Wire {
 public:
  explicit Wire(const Config& config) : config_(config) {
    fsdp::init_process_group({.engine = config.engine});
    config_.rank = fsdp::rank();
    mesh_ = fsdp::init_device_mesh(torch::kCPU, {config.world}, {"dp"});
    channel_ = mesh_.state()->axis_channel(0, fsdp::mesh::Lane::kGather);
  }

  double run(const std::string& op, int64_t bytes, int64_t count, bool own) {
    const int64_t elements = bytes / static_cast<int64_t>(sizeof(float));
    const fsdp::shard::Segments segments(config_.world, elements);
    const auto part = own ? channel_->buffer(bytes, at::kCPU).view(at::kFloat) : made(elements, at::kFloat);
    part.fill_(config_.rank + 1);
    const auto whole = made(elements * config_.world, at::kFloat);
    const auto gather = [&] { channel_->all_gather(whole, part, segments)->wait(); };
    // Each reduction has an input of its own, as the engine's have: it is the channel's once it was issued.
    const auto reduce = [&] {
      const auto input = channel_->buffer(static_cast<int64_t>(whole.nbytes()), at::kCPU).view(at::kFloat);
      channel_->reduce_scatter(part, input, segments)->wait();
    };
    if (op == "all_gather") {
      gather();
      for (int rank = 0; rank < config_.world; ++rank) {
        check(whole.narrow(0, rank * elements, elements).eq(rank + 1).all().item<bool>(), op);
      }
    } else {
      auto input = channel_->buffer(static_cast<int64_t>(whole.nbytes()), at::kCPU).view(at::kFloat);
      input.fill_(config_.rank + 1);
      channel_->reduce_scatter(part, input, segments)->wait();
      check(part.eq(config_.world * (config_.world + 1) / 2).all().item<bool>(), op);
    }
    return timed(count, [&] { op == "all_gather" ? gather() : reduce(); });
  }

  template <class Fn>
  double timed(int64_t count, Fn&& fn) {
    fsdp::barrier();
    const double begin = now_us();
    for (int64_t i = 0; i < count; ++i) fn();
    return (now_us() - begin) / static_cast<double>(count);
  }

  /// Copies as many bytes as `op` cannot do without: a gather writes every rank's part, a reduction reads every rank's
  /// and writes one (a copy reads and writes a byte each).
  double copy(const std::string& op, int64_t bytes, int64_t count) {
    const int64_t moved = op == "all_gather" ? config_.world * bytes : (config_.world + 1) * bytes / 2;
    const auto from = made(moved, at::kByte).fill_(1), to = made(moved, at::kByte).fill_(0);
    return timed(count, [&] { std::memcpy(to.data_ptr(), from.data_ptr(), static_cast<size_t>(moved)); });
  }

 private:
  static at::Tensor made(int64_t numel, at::ScalarType dtype) { return fsdp::base::empty({numel}, dtype); }

  Config config_;
  fsdp::DeviceMesh mesh_;
  std::shared_ptr<fsdp::comm::Channel> channel_;
};

json answer(Wire& wire, const std::string& line) {
  std::istringstream words(line);
  std::string command, op;
  int64_t bytes = 0, count = 0;
  words >> command >> op >> bytes >> count;
  if (command == "run" || command == "run_own") return {{"us", wire.run(op, bytes, count, command == "run_own")}};
  if (command == "copy") return {{"us", wire.copy(op, bytes, count)}};
  throw std::runtime_error("unknown command '" + line + "'");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("One rank of a collective's timing");
  Config config;
  app.add_option("--engine", config.engine)->check(CLI::IsMember({"gloo", "shm", "mpi"}));
  app.add_option("--rank", config.rank, "known from the environment");
  app.add_option("--world", config.world);
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  {
    torch::NoGradGuard no_grad;
    Wire wire(config);
    std::cout << json{{"ready", true}} << std::endl;
    for (std::string line; std::getline(std::cin, line);) std::cout << answer(wire, line) << std::endl;
  }
  fsdp::destroy_process_group();
  return 0;
}
