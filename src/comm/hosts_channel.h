#pragma once
#include <memory>
#include <string>
#include <vector>

#include "comm/channel.h"

namespace fsdp::comm {

/// Which ranks of a channel share a host: consecutive ones, in blocks that may differ in size.
struct Hosts {
  std::vector<int> first;  // the first rank of each host, and last the number of ranks
  int mine = 0;            // the host of this rank

  int count() const { return static_cast<int>(first.size()) - 1; }
  int ranks(int host) const { return first[host + 1] - first[host]; }
  int of(int rank) const;
  /// From a word a rank that is equal for those of one host. No hosts if the ranks of one are not consecutive.
  static Hosts of_words(const std::vector<std::string>& words, int rank);
};

/// Collectives among ranks of several hosts, of which some share one: what is of one host meets there first, and one
/// rank a host, the first, speaks with those of the other hosts. Each byte goes to another host once, however many
/// ranks need it there, and a host's gradients are summed before they leave it. CPU tensors.
///
/// A thread of the channel's own runs the collectives in the order of issue, so they go on while the rank computes.
/// Sums are rounded to the tensor's dtype once a host and once for the whole; every rank gets the same bits.
class HostsChannel final : public Channel {
 public:
  /// `within` joins the ranks of this host, `across` the first ranks of all hosts (null on the others).
  HostsChannel(std::string engine, const Rendezvous& rendezvous, Hosts hosts, std::shared_ptr<Channel> within,
               std::shared_ptr<Channel> across);

  int rank() const override;
  int size() const override;
  const std::string& name() const override;

  std::unique_ptr<Pending> all_gather(const at::Tensor& out, const at::Tensor& mine,
                                      const shard::Segments& segments) override;
  std::unique_ptr<Pending> reduce_scatter(const at::Tensor& out, const at::Tensor& in,
                                          const shard::Segments& segments) override;
  std::unique_ptr<Pending> all_reduce(const at::Tensor& tensor, ReduceOp op) override;
  std::unique_ptr<Pending> broadcast(const at::Tensor& tensor, int root) override;
  std::unique_ptr<Pending> all_gather_even(const at::Tensor& out, const at::Tensor& mine) override;
  at::Tensor buffer(int64_t nbytes, c10::Device device) override;

  class State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace fsdp::comm
