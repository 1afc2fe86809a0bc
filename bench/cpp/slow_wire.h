#pragma once
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "comm/channel.h"
#include "comm/solo_channel.h"

/// A wire that takes its time and no processor: what a step does meanwhile can be seen.
namespace bench {

using Clock = std::chrono::steady_clock;

/// How long a collective is on the wire, whatever its size, and how many there were.
struct SlowWire {
  std::chrono::microseconds each{0};
  int64_t collectives = 0;
  static SlowWire& get() {
    static SlowWire instance;
    return instance;
  }
};

/// A collective that is over at `end` at the earliest.
class LatePending final : public fsdp::comm::Pending {
 public:
  LatePending(std::unique_ptr<Pending> below, Clock::time_point end) : below_(std::move(below)), end_(end) {}
  void wait() override {
    std::this_thread::sleep_until(end_);
    below_->wait();
  }
  bool wait_for(std::chrono::milliseconds limit) override {
    const auto until = std::min(end_, Clock::now() + limit);
    std::this_thread::sleep_until(until);
    return until == end_ && below_->wait_for(std::chrono::milliseconds(0));
  }

 private:
  std::unique_ptr<Pending> below_;
  Clock::time_point end_;
};

/// The fake engine's channel as a lane on which one collective is under way at a time.
class SlowChannel final : public fsdp::comm::Channel {
 public:
  explicit SlowChannel(const fsdp::comm::Rendezvous& place) : below_(place.name, place.rank, place.size) {}
  int rank() const override { return below_.rank(); }
  int size() const override { return below_.size(); }
  const std::string& name() const override { return below_.name(); }
  std::unique_ptr<fsdp::comm::Pending> all_gather(const at::Tensor& out, const at::Tensor& mine,
                                                  const fsdp::shard::Segments& segments) override {
    return late(below_.all_gather(out, mine, segments));
  }
  std::unique_ptr<fsdp::comm::Pending> reduce_scatter(const at::Tensor& out, const at::Tensor& in,
                                                      const fsdp::shard::Segments& segments) override {
    return late(below_.reduce_scatter(out, in, segments));
  }
  std::unique_ptr<fsdp::comm::Pending> all_reduce(const at::Tensor& tensor, fsdp::comm::ReduceOp op) override {
    return late(below_.all_reduce(tensor, op));
  }
  std::unique_ptr<fsdp::comm::Pending> broadcast(const at::Tensor& tensor, int root) override {
    return late(below_.broadcast(tensor, root));
  }
  std::unique_ptr<fsdp::comm::Pending> all_gather_even(const at::Tensor& out, const at::Tensor& mine) override {
    return late(below_.all_gather_even(out, mine));
  }

 private:
  std::unique_ptr<fsdp::comm::Pending> late(std::unique_ptr<fsdp::comm::Pending> pending) {
    auto& wire = SlowWire::get();
    ++wire.collectives;
    free_ = std::max(free_, Clock::now()) + wire.each;
    return std::make_unique<LatePending>(std::move(pending), free_);
  }

  fsdp::comm::SoloChannel below_;
  Clock::time_point free_{};
};

}  // namespace bench
