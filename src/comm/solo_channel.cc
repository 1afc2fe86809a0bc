#include "comm/solo_channel.h"

#include "comm/copy.h"

namespace fsdp::comm {

std::unique_ptr<Pending> SoloChannel::all_gather(const at::Tensor& out, const at::Tensor& mine,
                                                 const shard::Segments& segments) {
  copy_elements(out, segments.begin(rank_), mine, 0, segments.length(rank_));
  return std::make_unique<DonePending>();
}

std::unique_ptr<Pending> SoloChannel::reduce_scatter(const at::Tensor& out, const at::Tensor& in,
                                                     const shard::Segments& segments) {
  copy_elements(out, 0, in, segments.begin(rank_), segments.length(rank_));
  return std::make_unique<DonePending>();
}

std::unique_ptr<Pending> SoloChannel::all_reduce(const at::Tensor&, ReduceOp) {
  return std::make_unique<DonePending>();
}

std::unique_ptr<Pending> SoloChannel::broadcast(const at::Tensor&, int) { return std::make_unique<DonePending>(); }

std::unique_ptr<Pending> SoloChannel::all_gather_even(const at::Tensor& out, const at::Tensor& mine) {
  copy_elements(out, rank_ * mine.numel(), mine, 0, mine.numel());
  return std::make_unique<DonePending>();
}

}  // namespace fsdp::comm
