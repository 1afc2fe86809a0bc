#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "comm/channel.h"

namespace fsdp::engine {

/// What a rank is about to do where it needs the others to do the same.
enum class Step : uint32_t {
  kForward,        // begin a forward that records gradients
  kForwardNoGrad,  // begin one that does not
  kForwardEnd,     // return from either
  kBackward,       // begin a backward
  kBackwardEnd,    // all local gradients have arrived
  kGather,         // gather a group that no recorded order foresaw
};

struct Ticket {
  Step step;
  uint32_t group = 0;  // for kGather
  uint64_t key = 0;    // what must be equal besides the step
};

/// The meeting point of all ranks of a model: a small all-reduce tells each of them whether all hold the same ticket,
/// and joins the flags that they bring. Where tickets differ, or a rank gave up, a second small message says who
/// wants what.
///
/// Every exchange is one message of fixed size, so that any two meet on the wire whatever their steps; nothing can be
/// mismatched, only found to differ (note: tickets before bytes).
class Agreement {
 public:
  /// `flags`: how many flags every exchange joins.
  Agreement(std::shared_ptr<comm::Channel> channel, size_t flags);

  struct Outcome {
    bool equal = true;
    bool failed = false;
    std::vector<Ticket> tickets;        // by rank, only where not equal or failed
    std::vector<std::string> messages;  // by rank, "" for those that did not fail; only where failed
  };
  /// Collective. `flags` (0 or 1 each) become the union over all ranks.
  Outcome exchange(const Ticket& ticket, std::vector<uint8_t>& flags);

  /// Tells the others, when they come to their next exchange, that this rank gave up. Does not wait.
  void post_failure(const std::string& message);
  /// Waits for what post_failure left on the wire.
  void settle();

  int size() const { return channel_->size(); }

 private:
  std::unique_ptr<comm::Pending> begin(const Ticket& ticket, bool failed, const std::vector<uint8_t>& flags,
                                       const at::Tensor& buffer);
  std::unique_ptr<comm::Pending> begin_details(const Ticket& ticket, const std::string& message, at::Tensor& all,
                                               at::Tensor& mine);

  std::shared_ptr<comm::Channel> channel_;
  size_t flags_;
  at::Tensor buffer_;
  struct Posted {
    at::Tensor a, b, c;
    std::unique_ptr<comm::Pending> first, second;
  };
  std::vector<Posted> posted_;
};

}  // namespace fsdp::engine
