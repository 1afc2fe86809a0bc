#include "comm/channel.h"

#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>

namespace fsdp::comm {
namespace {

/// An all-gather into a buffer of its own, which is then given away.
class PlacedPending final : public Pending {
 public:
  PlacedPending(std::unique_ptr<Pending> gather, at::Tensor flat, std::shared_ptr<Placement> place)
      : gather_(std::move(gather)), flat_(std::move(flat)), place_(std::move(place)) {}

  // If the gather fails, `place_` is gone: a second wait gives nothing away.
  void wait() override {
    const auto place = std::exchange(place_, nullptr);
    gather_->wait();
    if (place) place->whole(flat_.const_data_ptr());
    if (flat_.is_cpu()) flat_.reset();
  }
  bool wait_for(std::chrono::milliseconds limit) override {
    auto place = std::exchange(place_, nullptr);
    if (gather_->wait_for(limit)) {
      if (place) place->whole(flat_.const_data_ptr());
      if (flat_.is_cpu()) flat_.reset();
      return true;
    }
    place_ = std::move(place);
    return false;
  }
  int64_t held_bytes() const override { return flat_.defined() ? static_cast<int64_t>(flat_.nbytes()) : 0; }

 private:
  std::unique_ptr<Pending> gather_;
  at::Tensor flat_;  // on a device with streams as long as this: wait() returns before it was read
  std::shared_ptr<Placement> place_;
};

}  // namespace

std::unique_ptr<Pending> Channel::all_gather_to(std::shared_ptr<Placement> place, const at::Tensor& mine,
                                                const shard::Segments& segments) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto flat = staging().take(segments.total(), mine.options());
  auto gather = all_gather(flat, mine, segments);
  return std::make_unique<PlacedPending>(std::move(gather), std::move(flat), std::move(place));
}

at::Tensor Channel::buffer(int64_t nbytes, c10::Device device) {
  return staging().take(nbytes, at::TensorOptions().dtype(at::kByte).device(device));
}

}  // namespace fsdp::comm
