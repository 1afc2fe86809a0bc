#include "comm/solo_channel.h"

#include <utility>

#include "comm/copy.h"

namespace fsdp::comm {
namespace {

/// With one rank its own segment is the whole.
class OwnPending final : public Pending {
 public:
  OwnPending(std::shared_ptr<Placement> place, at::Tensor mine) : place_(std::move(place)), mine_(std::move(mine)) {}
  void wait() override {
    if (const auto place = std::exchange(place_, nullptr)) place->whole(mine_.const_data_ptr());
    mine_.reset();
  }
  bool wait_for(std::chrono::milliseconds) override {
    wait();
    return true;
  }

 private:
  std::shared_ptr<Placement> place_;
  at::Tensor mine_;
};

}  // namespace

std::unique_ptr<Pending> SoloChannel::all_gather(const at::Tensor& out, const at::Tensor& mine,
                                                 const shard::Segments& segments) {
  copy_elements(out, segments.begin(rank_), mine, 0, segments.length(rank_));
  return std::make_unique<DonePending>();
}

std::unique_ptr<Pending> SoloChannel::all_gather_to(std::shared_ptr<Placement> place, const at::Tensor& mine,
                                                    const shard::Segments& segments) {
  if (size_ > 1) return Channel::all_gather_to(std::move(place), mine, segments);
  return std::make_unique<OwnPending>(std::move(place), mine);
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
