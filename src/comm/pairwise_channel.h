#pragma once
#include "comm/backend_channel.h"

namespace fsdp::comm {

/// Gathers and reduces by messages between pairs of ranks, straight from and into the caller's tensors, each of its
/// own length: nothing is padded, and empty segments cost nothing. For backends whose own collectives copy more than
/// that; all-reduce and broadcast stay the backend's.
///
/// A rank sends its segment to each peer, so it puts as many bytes on the wire as a ring does, in as many messages as
/// there are peers with data: meant for the tens of ranks for which CPU clusters are used.
class PairwiseChannel final : public BackendChannel {
 public:
  using BackendChannel::BackendChannel;

  std::unique_ptr<Pending> all_gather(const at::Tensor& out, const at::Tensor& mine,
                                      const shard::Segments& segments) override;
  std::unique_ptr<Pending> reduce_scatter(const at::Tensor& out, const at::Tensor& in,
                                          const shard::Segments& segments) override;
  std::unique_ptr<Pending> all_gather_even(const at::Tensor& out, const at::Tensor& mine) override;

 private:
  /// One tag a collective: equal on all ranks, because they issue the same collectives in the same order.
  int next_tag();
  c10::intrusive_ptr<c10d::Work> send(const at::Tensor& tensor, int64_t begin, int64_t length, int64_t peer, int tag);
  c10::intrusive_ptr<c10d::Work> receive(const at::Tensor& tensor, int64_t begin, int64_t length, int64_t peer,
                                         int tag);

  int tag_ = 0;
};

}  // namespace fsdp::comm
