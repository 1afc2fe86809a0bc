#pragma once
#include "comm/backend_channel.h"

namespace fsdp::comm {

/// Gathers and reduces by one all-to-all with a length per pair of ranks, run by the backend's own threads: nothing is
/// padded, uneven and empty segments cost what they weigh, and what arrives lands in the caller's tensor. For backends
/// whose all-gather goes through a copy of the whole and whose reduce-scatter is an all-reduce. All-reduce and
/// broadcast stay the backend's.
///
/// Nothing is copied but where that costs less than it saves: a gather of little among three ranks or more sends from a
/// buffer that holds this rank's segment once for each peer, and so is one exchange and not one a peer. A reduction
/// receives the peers' segments (between two ranks: into its output) and adds all of them in one pass; half precision
/// is summed in fp32 and rounded once.
class ExchangeChannel final : public BackendChannel {
 public:
  using BackendChannel::BackendChannel;

  std::unique_ptr<Pending> all_gather(const at::Tensor& out, const at::Tensor& mine,
                                      const shard::Segments& segments) override;
  std::unique_ptr<Pending> reduce_scatter(const at::Tensor& out, const at::Tensor& in,
                                          const shard::Segments& segments) override;
  std::unique_ptr<Pending> all_gather_even(const at::Tensor& out, const at::Tensor& mine) override;

 private:
  using Lengths = std::vector<int64_t>;

  /// `in` holds what goes to each rank, in rank order, and `out` takes what comes from each; bytes.
  c10::intrusive_ptr<c10d::Work> exchange(at::Tensor out, Lengths out_lengths, at::Tensor in, Lengths in_lengths);
  /// The bytes in(peer) go to every peer and out(peer) takes its; a work each, which may run at the same time.
  template <class Out, class In>
  Works exchange_by_peer(Out&& out, In&& in);
};

}  // namespace fsdp::comm
