#pragma once
#include <memory>

#include <fsdp/custom_comm.h>

#include "comm/channel.h"

namespace fsdp::comm {

/// A channel whose gathers of parameters, or reductions of gradients, are a user's; the rest is the channel's below.
class CustomChannel final : public Channel {
 public:
  /// Either may be null. `dtype`: what the user's gather gets the bytes as.
  CustomChannel(std::shared_ptr<Channel> below, std::shared_ptr<CustomAllGather> gather,
                std::shared_ptr<CustomReduceScatter> reduce, at::ScalarType dtype = at::kByte);

  int rank() const override { return below_->rank(); }
  int size() const override { return below_->size(); }
  const std::string& name() const override { return below_->name(); }

  std::unique_ptr<Pending> all_gather(const at::Tensor& out, const at::Tensor& mine,
                                      const shard::Segments& segments) override {
    return below_->all_gather(out, mine, segments);
  }
  std::unique_ptr<Pending> all_gather_to(std::shared_ptr<Placement> place, const at::Tensor& mine,
                                         const shard::Segments& segments) override;
  std::unique_ptr<Pending> reduce_scatter(const at::Tensor& out, const at::Tensor& in,
                                          const shard::Segments& segments) override;
  std::unique_ptr<Pending> all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    return below_->all_reduce(tensor, op);
  }
  std::unique_ptr<Pending> broadcast(const at::Tensor& tensor, int root) override {
    return below_->broadcast(tensor, root);
  }
  std::unique_ptr<Pending> all_gather_even(const at::Tensor& out, const at::Tensor& mine) override {
    return below_->all_gather_even(out, mine);
  }
  bool one_host() const override { return below_->one_host(); }

 private:
  at::Tensor allocate(CustomComm& comm, const char* what, int64_t numel, const at::TensorOptions& options) const;

  std::shared_ptr<Channel> below_;
  std::shared_ptr<CustomAllGather> gather_;
  std::shared_ptr<CustomReduceScatter> reduce_;
  at::ScalarType dtype_;
};

}  // namespace fsdp::comm
