#pragma once
#include "comm/backend_channel.h"

namespace fsdp::comm {

/// Gathers and reduces by one all-to-all with a length per pair of ranks, run by the backend's own threads: nothing is
/// padded, uneven and empty segments cost what they weigh, and what arrives lands in the caller's tensor. For backends
/// whose all-gather goes through a copy of the whole and whose reduce-scatter is an all-reduce. All-reduce and
/// broadcast stay the backend's.
///
/// Between two ranks nothing is copied at all. Among more, an all-gather sends from a buffer that holds this rank's
/// segment once for each rank, and a reduce-scatter receives into one of that size.
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

  /// `in` holds what goes to each rank, in rank order, and `out` takes what comes from each.
  Works exchange(at::Tensor out, Lengths out_lengths, at::Tensor in, Lengths in_lengths);
};

}  // namespace fsdp::comm
