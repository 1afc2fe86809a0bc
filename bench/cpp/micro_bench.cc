// What the pieces cost: a trip through the sharded tensor's dispatch, one group's gather and reduce, one collective.
#include <atomic>
#include <string>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>
#include <fsdp/device_mesh.h>
#include <fsdp/fully_shard.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/channel.h"
#include "mesh/world.h"
#include "models.h"
#include "shard/segments.h"
#include "slow_wire.h"

namespace {

constexpr int kFakeWorld = 8;

fsdp::DeviceMesh fake_mesh() {
  static const auto mesh = fsdp::init_device_mesh(torch::kCPU, {kFakeWorld}, {"dp"});
  return mesh;
}

// --- the sharded tensor -----------------------------------------------------------------------------------------

/// An in-place operator that does next to nothing, on an ordinary tensor and on a sharded one: the difference is a
/// trip through the fallback.
void touch(benchmark::State& state, bool sharded) {
  auto layer = std::make_shared<bench::Rows>(kFakeWorld, 1);
  if (sharded) fsdp::fully_shard(layer, {.mesh = fake_mesh()});
  torch::NoGradGuard no_grad;
  for (auto _ : state) layer->a.mul_(1.0);
}
void PlainOperator(benchmark::State& state) { touch(state, false); }
void ShardedOperator(benchmark::State& state) { touch(state, true); }
BENCHMARK(PlainOperator);
BENCHMARK(ShardedOperator);

// --- one group --------------------------------------------------------------------------------------------------

void UnshardReshard(benchmark::State& state) {
  auto block = fsdp::fully_shard(std::make_shared<bench::Block>(state.range(0)), {.mesh = fake_mesh()});
  for (auto _ : state) {
    block.unshard();
    block.reshard();
  }
}
BENCHMARK(UnshardReshard)->Arg(16)->Arg(128)->Unit(benchmark::kMicrosecond);

/// Forward and backward of one block of 16 parameters, width 16.
void block_step(benchmark::State& state, bool sharded) {
  auto block = std::make_shared<bench::Block>(16);
  std::function<torch::Tensor(torch::Tensor)> forward = [&](torch::Tensor x) { return block->forward(x); };
  if (sharded) forward = fsdp::fully_shard(block, {.mesh = fake_mesh()});
  const auto x = torch::randn({2, 8, 16});
  for (auto _ : state) {
    forward(x).sum().backward();
    block->zero_grad();
  }
}
void PlainBlockStep(benchmark::State& state) { block_step(state, false); }
void ShardedBlockStep(benchmark::State& state) { block_step(state, true); }
BENCHMARK(PlainBlockStep)->Unit(benchmark::kMicrosecond);
BENCHMARK(ShardedBlockStep)->Unit(benchmark::kMicrosecond);

// --- a slow wire ------------------------------------------------------------------------------------------------

/// A step of six blocks while each collective is state.range(0) microseconds on the wire, which is `wire_us` in all.
/// What the step takes more than at 0 is the part of the wire that computing did not cover.
void StepOverASlowWire(benchmark::State& state) {
  auto& wire = bench::SlowWire::get();
  wire.each = std::chrono::microseconds(state.range(0));
  auto stack = std::make_shared<bench::Stack>();
  for (int i = 0; i < 6; ++i) {
    stack->push_back(std::make_shared<bench::Block>(256));
    fsdp::fully_shard(stack->layers.back(), {.mesh = fake_mesh()});
  }
  auto model = fsdp::fully_shard(stack, {.mesh = fake_mesh()});
  const auto x = torch::randn({2, 64, 256});
  const auto step = [&] {
    model(x).square().mean().backward();
    stack->zero_grad();
  };
  for (int i = 0; i < 3; ++i) step();
  wire.collectives = 0;
  for (auto _ : state) step();
  const auto steps = static_cast<double>(state.iterations());
  state.counters["collectives"] = static_cast<double>(wire.collectives) / steps;
  state.counters["wire_us"] = static_cast<double>(wire.collectives * wire.each.count()) / steps;
  wire.each = {};
}
BENCHMARK(StepOverASlowWire)->Arg(0)->Arg(500)->Arg(1000)->Arg(2000)->Unit(benchmark::kMicrosecond)->UseRealTime();

// --- the wire: two ranks, each a thread -------------------------------------------------------------------------

constexpr int kRanks = 2;

/// Where the two threads of the benchmark that runs now meet. A benchmark runs several times until its time is
/// long enough; each run meets in a place of its own.
struct Meeting {
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<int> run{0};
};
Meeting& meeting() {
  static auto* instance = new Meeting;
  return *instance;
}
void next_run(const benchmark::State&) { ++meeting().run; }

std::shared_ptr<fsdp::comm::Channel> open(const std::string& engine, int rank) {
  const auto place = "run" + std::to_string(meeting().run);
  return fsdp::comm::open_channel(engine, {.store = c10::make_intrusive<c10d::PrefixStore>(place, meeting().store),
                                           .rank = rank,
                                           .size = kRanks,
                                           .name = place});
}

enum class Collective { kAllGather, kReduceScatter };

/// state.range(0): bytes of a rank's shard.
void collective(benchmark::State& state, const std::string& engine, Collective kind) {
  at::set_num_threads(1);
  const auto elements = state.range(0) / static_cast<int64_t>(sizeof(float));
  const fsdp::shard::Segments segments(kRanks, elements);
  const auto channel = open(engine, state.thread_index());
  const auto shard = torch::ones({elements}), whole = torch::ones({elements * kRanks});
  const auto bytes = static_cast<int64_t>(whole.nbytes());
  for (auto _ : state) {
    if (kind == Collective::kAllGather) {
      channel->all_gather(whole, shard, segments)->wait();
    } else {
      // A fresh input each time, as the engine has one: it is the channel's once it was issued.
      const auto input = channel->buffer(bytes, at::kCPU).view(at::kFloat);
      channel->reduce_scatter(shard, input, segments)->wait();
    }
  }
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

void register_collectives() {
  for (const std::string engine : {"fake", "inproc", "gloo", "shm"}) {
    for (const auto& [name, kind] :
         {std::pair{"AllGather", Collective::kAllGather}, std::pair{"ReduceScatter", Collective::kReduceScatter}}) {
      benchmark::RegisterBenchmark((name + ("/" + engine)).c_str(), collective, engine, kind)
          ->RangeMultiplier(64)
          ->Range(4 << 10, 16 << 20)
          ->Threads(engine == "fake" ? 1 : kRanks)
          ->Setup(next_run)
          ->UseRealTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  at::globalContext().setFlushDenormal(true);  // a fake gather leaves whatever was in memory
  fsdp::comm::register_engine(
      "slow", [](const fsdp::comm::Rendezvous& place) { return std::make_shared<bench::SlowChannel>(place); });
  fsdp::mesh::World::set_process_world(
      std::make_shared<fsdp::mesh::World>("slow", nullptr, 0, kFakeWorld, 0, std::chrono::seconds(30)));
  register_collectives();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
