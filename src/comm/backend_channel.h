#pragma once
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/channel.h"
#include "comm/origin.h"

namespace fsdp::comm {

/// A channel over the collectives of any c10d backend. Even segments go to the backend as they are; uneven ones
/// through a buffer in which every segment is as long as the longest.
class BackendChannel : public Channel {
 public:
  BackendChannel(std::string engine, const Rendezvous& rendezvous, c10::intrusive_ptr<c10d::Backend> backend);

  int rank() const override { return origin_->rank; }
  int size() const override { return origin_->size; }
  const std::string& name() const override { return origin_->name; }

  std::unique_ptr<Pending> all_gather(const at::Tensor& out, const at::Tensor& mine,
                                      const shard::Segments& segments) override;
  std::unique_ptr<Pending> reduce_scatter(const at::Tensor& out, const at::Tensor& in,
                                          const shard::Segments& segments) override;
  std::unique_ptr<Pending> all_reduce(const at::Tensor& tensor, ReduceOp op) override;
  std::unique_ptr<Pending> broadcast(const at::Tensor& tensor, int root) override;
  std::unique_ptr<Pending> all_gather_even(const at::Tensor& out, const at::Tensor& mine) override;

 protected:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

  /// Calls `issue`, which gives the works to wait for, below autograd and with its errors translated. The Pending
  /// holds `tensors` and runs `finish` on the thread that waits, once the works are done.
  template <class Issue>
  std::unique_ptr<Pending> start(const char* operation, std::vector<at::Tensor> tensors, Issue&& issue,
                                 std::function<void()> finish = nullptr) {
    auto works = translating_errors(*origin_, operation, [&]() -> Works {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      return issue();
    });
    return make_pending(operation, std::move(tensors), std::move(works), std::move(finish));
  }

  c10d::Backend& backend() const { return *backend_; }

 private:
  std::unique_ptr<Pending> make_pending(const char* operation, std::vector<at::Tensor> tensors, Works works,
                                        std::function<void()> finish);

  std::shared_ptr<const Origin> origin_;
  c10::intrusive_ptr<c10d::Backend> backend_;
};

}  // namespace fsdp::comm
