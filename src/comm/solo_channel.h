#pragma once
#include <string>

#include "comm/channel.h"

namespace fsdp::comm {

/// A channel that only ever sees this rank's own contribution, and never talks to anybody. With one rank that is the
/// whole truth. With more it is the fake engine: own segments land where they belong, everything else is left as it
/// was. A call costs the same in every world size.
class SoloChannel final : public Channel {
 public:
  SoloChannel(std::string name, int rank, int size) : name_(std::move(name)), rank_(rank), size_(size) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::string& name() const override { return name_; }

  std::unique_ptr<Pending> all_gather(const at::Tensor& out, const at::Tensor& mine,
                                      const shard::Segments& segments) override;
  std::unique_ptr<Pending> all_gather_to(std::shared_ptr<Placement> place, const at::Tensor& mine,
                                         const shard::Segments& segments) override;
  std::unique_ptr<Pending> reduce_scatter(const at::Tensor& out, const at::Tensor& in,
                                          const shard::Segments& segments) override;
  std::unique_ptr<Pending> all_reduce(const at::Tensor& tensor, ReduceOp op) override;
  std::unique_ptr<Pending> broadcast(const at::Tensor& tensor, int root) override;
  std::unique_ptr<Pending> all_gather_even(const at::Tensor& out, const at::Tensor& mine) override;

 private:
  std::string name_;
  int rank_, size_;
};

/// A collective that is over when it is issued.
class DonePending final : public Pending {
 public:
  bool wait_for(std::chrono::milliseconds) override { return true; }
  void wait() override {}
};

}  // namespace fsdp::comm
