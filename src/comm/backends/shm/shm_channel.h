#pragma once
#include <chrono>
#include <deque>
#include <memory>
#include <string>

#include "comm/backends/shm/peers.h"
#include "comm/channel.h"

namespace fsdp::comm::shm {

/// Collectives among ranks that share memory; CPU tensors. Bytes move on the thread that waits.
///
/// Cost of n bytes a rank, in bytes copied by each rank: all_gather n * world; reduce_scatter into n reads n * world
/// and writes n. Input of less than 256 KB that is not from buffer(), or of any size where ranks may not read each
/// other's memory, is copied once more; so is what a peer has not read when its owner has waited as long as a copy
/// takes. all_reduce reads every contribution: for small or few tensors.
class ShmChannel final : public Channel {
 public:
  ShmChannel(const Rendezvous& rendezvous, Peers peers);
  ~ShmChannel() override;

  int rank() const override;
  int size() const override;
  const std::string& name() const override;

  std::unique_ptr<Pending> all_gather(const at::Tensor& out, const at::Tensor& mine,
                                      const shard::Segments& segments) override;
  std::unique_ptr<Pending> all_gather_to(std::shared_ptr<Placement> place, const at::Tensor& mine,
                                         const shard::Segments& segments) override;
  std::unique_ptr<Pending> reduce_scatter(const at::Tensor& out, const at::Tensor& in,
                                          const shard::Segments& segments) override;
  std::unique_ptr<Pending> all_reduce(const at::Tensor& tensor, ReduceOp op) override;
  std::unique_ptr<Pending> broadcast(const at::Tensor& tensor, int root) override;
  std::unique_ptr<Pending> all_gather_even(const at::Tensor& out, const at::Tensor& mine) override;
  at::Tensor buffer(int64_t nbytes, c10::Device device) override;
  bool one_host() const override { return true; }

  class State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace fsdp::comm::shm
