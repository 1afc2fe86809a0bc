#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "base/buffer_pool.h"
#include "shard/segments.h"

namespace c10d {
class Store;
}  // namespace c10d

namespace fsdp::comm {

enum class ReduceOp { kSum, kMax, kMin };

/// A collective under way. Destroying it without waiting waits, and drops an error. On a device with streams it holds
/// its buffers until it is destroyed, which is the caller's to delay until nothing reads them any more.
class Pending {
 public:
  virtual ~Pending() = default;
  /// Blocks the caller until the result is there (on a device: makes the current stream wait for it), then finishes
  /// what the collective left to do on the caller's thread (unpadding). Throws CommError or TimeoutError. Calling
  /// it again is a no-op.
  virtual void wait() = 0;
  /// As wait(), but for `limit` at most. False: the result is not there yet, nothing changed, and either may be called
  /// again. Costs up to a tenth of a millisecond more than wait().
  virtual bool wait_for(std::chrono::milliseconds limit) = 0;
  /// Bytes of a buffer that the channel itself took for the result (all_gather_to), until that is there.
  virtual int64_t held_bytes() const { return 0; }
};

/// Memory of the CPU that takes some of the bytes of a segment.
struct Piece {
  void* to;
  int64_t bytes;
};

/// Where the segments of an all-gather go when their reader does not want them in one flat buffer. Called on a thread
/// that waits on the channel, for this or for a later collective; the bytes are valid during the call only.
class Placement {
 public:
  virtual ~Placement() = default;
  /// The segment of one rank, or ...
  virtual void segment(int64_t rank, const void* bytes) = 0;
  /// ... all of them, one after another.
  virtual void whole(const void* bytes) = 0;
  /// The pieces that take a rank's segment, in its order, for who can write there directly; none: nobody wants it.
  /// False, if there is no such list: segment() must be called.
  virtual bool pieces(int64_t, std::vector<Piece>&) { return false; }
};

/// One ordered lane of collectives among a fixed set of ranks: what rank A issues as its n-th call, every other rank
/// must issue as its n-th call. A channel is used by one thread at a time. All calls are asynchronous: the tensors
/// given must stay alive (the Pending holds them) and unchanged until wait() returned.
/// All tensors are contiguous and on the mesh's device.
class Channel {
 public:
  virtual ~Channel() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Used in error messages: "gloo channel 'dp.gather'".
  virtual const std::string& name() const = 0;

  /// out[segments r] = rank r's `mine`. `out` is 1-D with segments.total() elements, `mine` is 1-D with
  /// segments.length(rank()) elements of the same dtype (any dtype: bytes are moved).
  virtual std::unique_ptr<Pending> all_gather(const at::Tensor& out, const at::Tensor& mine,
                                              const shard::Segments& segments) = 0;
  /// The same, each non-empty segment (or all at once) given to `place` instead. A channel that reads its peers' memory
  /// needs no buffer for it; the others gather into one of their own.
  virtual std::unique_ptr<Pending> all_gather_to(std::shared_ptr<Placement> place, const at::Tensor& mine,
                                                 const shard::Segments& segments);
  /// out = the sum over all ranks of their `in`'s segment rank(). `in` is 1-D with segments.total() elements, `out`
  /// 1-D with segments.length(rank()), and shares no memory with `in`.
  virtual std::unique_ptr<Pending> reduce_scatter(const at::Tensor& out, const at::Tensor& in,
                                                  const shard::Segments& segments) = 0;
  /// In place.
  virtual std::unique_ptr<Pending> all_reduce(const at::Tensor& tensor, ReduceOp op) = 0;
  virtual std::unique_ptr<Pending> broadcast(const at::Tensor& tensor, int root) = 0;

  /// out[r * n .. (r + 1) * n) = rank r's `mine` (n elements, equal on all ranks).
  virtual std::unique_ptr<Pending> all_gather_even(const at::Tensor& out, const at::Tensor& mine) = 0;

  /// Whether its ranks are known to share one host, so that they can have memory in common (CommonMemory).
  virtual bool one_host() const { return size() == 1; }

  /// Uninitialised bytes for the input of a gather or a reduction (views of it will do) from which this channel sends
  /// without a copy. Once such an input was issued it is not the caller's to write any more: peers may read it after
  /// wait(). May be called while another thread uses the channel.
  virtual at::Tensor buffer(int64_t nbytes, c10::Device device);

 protected:
  /// For what collectives send from and receive into where that is not a tensor of the caller's.
  const base::BufferPool& staging() const { return staging_; }

 private:
  base::BufferPool staging_;
};

/// Where a channel's members meet, and how long they wait for each other.
struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;  // already prefixed for this channel; null for engines that need none
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};
  std::string name;
};

/// An engine opens channels among two or more ranks; a channel of one rank needs no engine.
using EngineFactory = std::function<std::shared_ptr<Channel>(const Rendezvous&)>;
/// Adds an engine to those built in (engines.cc lists them). InvalidArgument if the name is taken.
void register_engine(const std::string& engine, EngineFactory factory);
std::vector<std::string> engines();

/// Opens a channel; collective among its members. NotSupported names the known engines.
std::shared_ptr<Channel> open_channel(const std::string& engine, const Rendezvous& rendezvous);

}  // namespace fsdp::comm
