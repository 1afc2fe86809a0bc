#include "comm/custom_channel.h"

#include <utility>

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>
#include <fsdp/error.h>

#include "comm/solo_channel.h"

namespace fsdp {

at::Tensor CustomComm::allocate(int64_t numel, const at::TensorOptions& options) { return at::empty({numel}, options); }

}  // namespace fsdp

namespace fsdp::comm {
namespace {

/// What the user started, then what is left to do with its result.
class CustomPending final : public Pending {
 public:
  CustomPending(WaitFn started, std::function<void()> finish, int64_t held, c10::Device device)
      : started_(std::move(started)), finish_(std::move(finish)), held_(held), on_host_(device.is_cpu()) {}
  ~CustomPending() override {
    try {
      if (!done_ && started_) started_();
    } catch (const std::exception&) {
      // As everywhere: one who does not wait does not want to know.
    }
  }

  void wait() override {
    if (done_) return;
    if (started_) started_();
    done_ = true;
    finish_();
    held_ = 0;
    if (on_host_) finish_ = nullptr;  // elsewhere a stream may still read what it holds
  }
  bool wait_for(std::chrono::milliseconds) override {
    wait();  // a user's collective cannot be asked how far it is
    return true;
  }
  int64_t held_bytes() const override { return held_; }

 private:
  WaitFn started_;
  std::function<void()> finish_;
  int64_t held_;
  bool on_host_, done_ = false;
};

}  // namespace

CustomChannel::CustomChannel(std::shared_ptr<Channel> below, std::shared_ptr<CustomAllGather> gather,
                             std::shared_ptr<CustomReduceScatter> reduce, at::ScalarType dtype)
    : below_(std::move(below)), gather_(std::move(gather)), reduce_(std::move(reduce)), dtype_(dtype) {}

at::Tensor CustomChannel::allocate(CustomComm& comm, const char* what, int64_t numel,
                                   const at::TensorOptions& options) const {
  auto buffer = comm.allocate(numel, options);
  if (!buffer.defined() || buffer.numel() != numel || buffer.scalar_type() != options.dtype().toScalarType() ||
      buffer.device() != options.device() || !buffer.is_contiguous()) {
    throw InvalidArgument(c10::str(
        name(), ", rank ", rank(), ": the custom ", what, " allocated ",
        buffer.defined() ? c10::str(buffer.numel(), " elements of ", buffer.scalar_type(), " on ", buffer.device())
                         : std::string("nothing"),
        ", expected ", numel, " contiguous elements of ", options.dtype().toScalarType(), " on ", options.device()));
  }
  return buffer.view({numel});
}

std::unique_ptr<Pending> CustomChannel::all_gather_to(std::shared_ptr<Placement> place, const at::Tensor& mine,
                                                      const shard::Segments& segments) {
  if (!gather_) return below_->all_gather_to(std::move(place), mine, segments);
  if (segments.total() == 0) return std::make_unique<DonePending>();
  const auto bytes = mine.view(at::kByte);
  const int64_t unit = mine.element_size(), longest = segments.longest() * unit;
  const auto options = mine.options().dtype(dtype_);
  const auto width = static_cast<int64_t>(c10::elementSize(dtype_));
  const auto input = allocate(*gather_, "all-gather", longest / width, options);
  const auto output = allocate(*gather_, "all-gather", longest / width * size(), options);
  input.view(at::kByte).narrow(0, 0, bytes.numel()).copy_(bytes);
  auto started = gather_->run(output, input);
  auto finish = [place = std::move(place), output, input, segments, longest, unit] {
    const auto* from = static_cast<const char*>(output.const_data_ptr());
    for (int64_t r = 0; r < segments.active(); ++r) {
      if (segments.length(r) * unit > 0) place->segment(r, from + r * longest);
    }
  };
  return std::make_unique<CustomPending>(std::move(started), std::move(finish), static_cast<int64_t>(output.nbytes()),
                                         output.device());
}

std::unique_ptr<Pending> CustomChannel::reduce_scatter(const at::Tensor& out, const at::Tensor& in,
                                                       const shard::Segments& segments) {
  if (!reduce_) return below_->reduce_scatter(out, in, segments);
  if (segments.total() == 0) return std::make_unique<DonePending>();
  const int64_t longest = segments.longest(), own = segments.length(rank());
  const auto input = allocate(*reduce_, "reduce-scatter", longest * size(), in.options());
  const auto output = allocate(*reduce_, "reduce-scatter", longest, in.options());
  if (!segments.even()) input.zero_();
  for (int64_t r = 0; r < segments.active(); ++r) {
    input.narrow(0, r * longest, segments.length(r)).copy_(in.narrow(0, segments.begin(r), segments.length(r)));
  }
  auto started = reduce_->run(output, input);
  auto finish = [out, output, input, own] { out.copy_(output.narrow(0, 0, own)); };
  return std::make_unique<CustomPending>(std::move(started), std::move(finish), 0, output.device());
}

}  // namespace fsdp::comm
