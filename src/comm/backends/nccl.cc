#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "comm/backend_channel.h"
#include "comm/backends/backends.h"

namespace fsdp::comm {
namespace {

/// Tensors of a GPU go over NCCL, tensors of the host (the engine's agreements) over a channel of the host's: the n-th
/// of each meets the peers' n-th.
class NcclChannel final : public BackendChannel {
 public:
  NcclChannel(const Rendezvous& rendezvous, c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<Channel> host)
      : BackendChannel("nccl", rendezvous, std::move(backend)), host_(std::move(host)) {}

  std::unique_ptr<Pending> all_gather(const at::Tensor& out, const at::Tensor& mine,
                                      const shard::Segments& segments) override {
    return mine.is_cpu() ? host_->all_gather(out, mine, segments) : BackendChannel::all_gather(out, mine, segments);
  }
  std::unique_ptr<Pending> all_gather_to(std::shared_ptr<Placement> place, const at::Tensor& mine,
                                         const shard::Segments& segments) override {
    return mine.is_cpu() ? host_->all_gather_to(std::move(place), mine, segments)
                         : BackendChannel::all_gather_to(std::move(place), mine, segments);
  }
  std::unique_ptr<Pending> reduce_scatter(const at::Tensor& out, const at::Tensor& in,
                                          const shard::Segments& segments) override {
    return in.is_cpu() ? host_->reduce_scatter(out, in, segments) : BackendChannel::reduce_scatter(out, in, segments);
  }
  std::unique_ptr<Pending> all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    return tensor.is_cpu() ? host_->all_reduce(tensor, op) : BackendChannel::all_reduce(tensor, op);
  }
  std::unique_ptr<Pending> broadcast(const at::Tensor& tensor, int root) override {
    return tensor.is_cpu() ? host_->broadcast(tensor, root) : BackendChannel::broadcast(tensor, root);
  }
  std::unique_ptr<Pending> all_gather_even(const at::Tensor& out, const at::Tensor& mine) override {
    return mine.is_cpu() ? host_->all_gather_even(out, mine) : BackendChannel::all_gather_even(out, mine);
  }
  at::Tensor buffer(int64_t nbytes, c10::Device device) override {
    return device.is_cpu() ? host_->buffer(nbytes, device) : BackendChannel::buffer(nbytes, device);
  }
  bool one_host() const override { return host_->one_host(); }

 private:
  std::shared_ptr<Channel> host_;
};

c10::intrusive_ptr<c10d::Store> part_of(const Rendezvous& rendezvous, const char* prefix) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, rendezvous.store);
}

}  // namespace

std::shared_ptr<Channel> open_nccl(const Rendezvous& rendezvous) {
  auto on_host = rendezvous;
  on_host.store = part_of(rendezvous, "host");
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = rendezvous.timeout;
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(part_of(rendezvous, "nccl"), rendezvous.rank,
                                                             rendezvous.size, std::move(options));
  return std::make_shared<NcclChannel>(rendezvous, std::move(backend), open_nearest(on_host));
}

}  // namespace fsdp::comm
