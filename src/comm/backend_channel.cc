#include "comm/backend_channel.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>

#include "comm/copy.h"
#include "comm/solo_channel.h"

namespace fsdp::comm {
namespace {

class WorkPending final : public Pending {
 public:
  WorkPending(std::shared_ptr<const Origin> origin, c10::intrusive_ptr<c10d::Backend> backend, const char* operation,
              std::vector<at::Tensor> tensors, std::vector<c10::intrusive_ptr<c10d::Work>> works,
              std::function<void()> finish)
      : origin_(std::move(origin)),
        backend_(std::move(backend)),
        operation_(operation),
        tensors_(std::move(tensors)),
        works_(std::move(works)),
        finish_(std::move(finish)) {}

  ~WorkPending() override {
    try {
      wait();
    } catch (...) {  // nobody is left to hear of it
    }
  }

  void wait() override {
    if (done_) {
      return;
    }
    done_ = true;
    translating_errors(*origin_, operation_, [&] {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      for (const auto& work : works_) {
        work->wait();
      }
      if (finish_) {
        finish_();
      }
    });
    works_.clear();
    const bool read = std::all_of(tensors_.begin(), tensors_.end(), [](const auto& t) { return t.is_cpu(); });
    if (!read) return;  // a stream may still read them
    finish_ = nullptr;
    tensors_.clear();
  }

  bool wait_for(std::chrono::milliseconds limit) override {
    // Work::wait(timeout) cannot say this: a timeout there is an error, and fails the collective on some backends.
    const auto until = std::chrono::steady_clock::now() + limit;
    for (const auto& work : works_) {
      for (auto pause = std::chrono::microseconds(10); !work->isCompleted();
           pause = std::min(pause * 2, std::chrono::microseconds(100))) {
        if (std::chrono::steady_clock::now() >= until) return false;
        std::this_thread::sleep_for(pause);
      }
    }
    wait();
    return true;
  }

 private:
  std::shared_ptr<const Origin> origin_;
  c10::intrusive_ptr<c10d::Backend> backend_;  // outlives its works
  const char* operation_;
  std::vector<at::Tensor> tensors_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  std::function<void()> finish_;
  bool done_ = false;
};

c10d::ReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
    case ReduceOp::kSum:
      break;
  }
  return c10d::ReduceOp::SUM;
}

// Backends know a handful of dtypes; where only bytes move, any other dtype travels as bytes.
at::Tensor as_carried(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kByte:
    case at::kChar:
    case at::kInt:
    case at::kLong:
      return tensor;
    default:
      return tensor.view(at::kByte);
  }
}

}  // namespace

BackendChannel::BackendChannel(std::string engine, const Rendezvous& rendezvous,
                               c10::intrusive_ptr<c10d::Backend> backend)
    : origin_(std::make_shared<Origin>(
          Origin{std::move(engine), rendezvous.name, rendezvous.rank, rendezvous.size, rendezvous.timeout})),
      backend_(std::move(backend)) {}

std::unique_ptr<Pending> BackendChannel::make_pending(const char* operation, std::vector<at::Tensor> tensors,
                                                      Works works, std::function<void()> finish) {
  return std::make_unique<WorkPending>(origin_, backend_, operation, std::move(tensors), std::move(works),
                                       std::move(finish));
}

std::unique_ptr<Pending> BackendChannel::all_gather(const at::Tensor& out, const at::Tensor& mine,
                                                    const shard::Segments& segments) {
  if (segments.even()) {
    return all_gather_even(out, mine);
  }
  const auto longest = segments.longest();
  auto padded = at::zeros({longest}, mine.options());
  auto staged = staging().take(longest * size(), mine.options());
  copy_elements(padded, 0, mine, 0, mine.numel());
  auto unpad = [out, staged, segments] {
    for (int64_t r = 0; r < segments.active(); ++r) {
      copy_elements(out, segments.begin(r), staged, r * segments.longest(), segments.length(r));
    }
  };
  auto issue = [&]() -> Works {
    auto to = as_carried(staged), from = as_carried(padded);
    return {backend_->_allgather_base(to, from)};
  };
  return start("all_gather", {padded}, issue, std::move(unpad));
}

std::unique_ptr<Pending> BackendChannel::reduce_scatter(const at::Tensor& out, const at::Tensor& in,
                                                        const shard::Segments& segments) {
  if (segments.longest() == 0) {
    return std::make_unique<DonePending>();
  }
  if (segments.even()) {
    return start("reduce_scatter", {out, in}, [&]() -> Works {
      auto to = out, from = in;
      return {backend_->_reduce_scatter_base(to, from)};
    });
  }
  const auto longest = segments.longest();
  auto staged = at::zeros({longest * size()}, in.options());
  auto reduced = staging().take(longest, in.options());
  for (int64_t r = 0; r < segments.active(); ++r) {
    copy_elements(staged, r * longest, in, segments.begin(r), segments.length(r));
  }
  auto unpad = [out, reduced] { copy_elements(out, 0, reduced, 0, out.numel()); };
  return start(
      "reduce_scatter", {staged}, [&]() -> Works { return {backend_->_reduce_scatter_base(reduced, staged)}; },
      std::move(unpad));
}

std::unique_ptr<Pending> BackendChannel::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  return start("all_reduce", {tensor}, [&]() -> Works {
    std::vector<at::Tensor> tensors{tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = to_c10d(op);
    return {backend_->allreduce(tensors, options)};
  });
}

std::unique_ptr<Pending> BackendChannel::broadcast(const at::Tensor& tensor, int root) {
  return start("broadcast", {tensor}, [&]() -> Works {
    std::vector<at::Tensor> tensors{as_carried(tensor)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return {backend_->broadcast(tensors, options)};
  });
}

std::unique_ptr<Pending> BackendChannel::all_gather_even(const at::Tensor& out, const at::Tensor& mine) {
  if (mine.numel() == 0) {
    return std::make_unique<DonePending>();
  }
  return start("all_gather", {out, mine}, [&]() -> Works {
    auto to = as_carried(out), from = as_carried(mine);
    return {backend_->_allgather_base(to, from)};
  });
}

}  // namespace fsdp::comm
