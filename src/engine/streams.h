#pragma once
#include <memory>
#include <utility>

#include "base/stream.h"
#include "comm/channel.h"

namespace fsdp::engine {

/// The streams of a Context's collectives on one device; on the CPU there are none and nothing costs. Their rules are
/// docs/design/streams.md. "The current stream" is the one on which the model computes.
class Streams {
 public:
  explicit Streams(c10::Device d) : device(d), gather(base::Stream::another(d)), reduce(base::Stream::another(d)) {}

  const c10::Device device;
  const base::Stream gather;  // assembling an all-gather's input, and the all-gather
  const base::Stream reduce;  // reduce-scatter, all-reduce, averages, and handing gradients out

  /// Before a gather is issued: after the event, if the user gave one for the shards' last write, or else after all
  /// that the current stream has by now.
  void before_gather() const {
    if (optimizer_event_) {
      gather.wait_for(*optimizer_event_);
    } else {
      gather.wait_for_current();
    }
  }
  /// Once the current stream has the copies out of `gathered`: its buffers are the gather stream's to use again after
  /// those copies.
  void after_copy_out(std::unique_ptr<comm::Pending> gathered) const {
    gather.wait_for_current();
    gathered.reset();
  }

  /// The gathers of the next forward need no more than this event of the current device. Null: they need all.
  void set_optimizer_event(std::shared_ptr<const c10::Event> event) { optimizer_event_ = std::move(event); }

 private:
  std::shared_ptr<const c10::Event> optimizer_event_;
};

}  // namespace fsdp::engine
