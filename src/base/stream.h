#pragma once
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <optional>

namespace fsdp::base {

/// A queue of a device's work, or nothing where a device has none (the CPU): then every call does nothing.
class Stream {
 public:
  Stream() = default;
  explicit Stream(c10::Stream stream) : stream_(stream) {}

  /// The one on which this thread's work on `device` goes.
  static Stream current(c10::Device device) {
    return has_streams(device) ? Stream(guard(device).getStream(device)) : Stream();
  }
  /// One of the device's pool, for work beside the current one's.
  static Stream another(c10::Device device) {
    return has_streams(device) ? Stream(guard(device).getStreamFromGlobalPool(device, /*isHighPriority=*/true))
                               : Stream();
  }

  explicit operator bool() const { return stream_.has_value(); }
  const c10::Stream& operator*() const { return *stream_; }

  /// What comes on this stream from now on begins after all that is on `other` by now. The host goes on.
  void wait_for(const Stream& other) const {
    if (!stream_ || !other.stream_ || *stream_ == *other.stream_) return;
    wait_for(*other.mark());
  }
  /// The end of what is on this stream by now.
  std::optional<c10::Event> mark() const {
    if (!stream_) return std::nullopt;
    c10::Event event(stream_->device_type());
    event.record(*stream_);
    return event;
  }
  void wait_for(const c10::Event& event) const {
    if (stream_) event.block(*stream_);
  }
  /// Blocks the host until all that is on this stream by now is done.
  void synchronize() const {
    if (stream_) stream_->synchronize();
  }
  /// wait_for() of the work on the current stream by now ...
  void wait_for_current() const {
    if (stream_) wait_for(current(stream_->device()));
  }
  /// ... and the other way round.
  void hold_current() const {
    if (stream_) current(stream_->device()).wait_for(*this);
  }

 private:
  static bool has_streams(c10::Device device) { return !device.is_cpu() && !device.is_meta(); }
  static c10::impl::VirtualGuardImpl guard(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()); }

  std::optional<c10::Stream> stream_;
};

/// Makes a stream the current one of this thread for a scope.
class OnStream {
 public:
  explicit OnStream(const Stream& stream) {
    if (stream) guard_.reset_stream(*stream);
  }
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;

 private:
  c10::OptionalStreamGuard guard_;
};

}  // namespace fsdp::base
