#include "comm/backends/shm/shm_channel.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/StringUtil.h>
#include <fsdp/error.h>
#include <torch/csrc/distributed/c10d/exception.h>

#include "comm/backends/backends.h"
#include "comm/backends/shm/arena.h"
#include "comm/origin.h"
#include "comm/sum.h"

namespace fsdp::comm::shm {
namespace {

using Clock = std::chrono::steady_clock;

enum class Kind : int32_t { kAllGather, kReduceScatter, kAllReduce, kBroadcast };

// A contribution of so many bytes is read where it lies; a smaller one is copied when it is issued.
constexpr int64_t kDirect = 256 << 10;
constexpr int64_t kReducedAtOnce = 256 << 10;
// How fast memory is copied, in bytes a nanosecond, to tell how long waiting is worth it.
constexpr int64_t kCopySpeed = 8;

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kAllGather:
      return "all_gather";
    case Kind::kReduceScatter:
      return "reduce_scatter";
    case Kind::kAllReduce:
      return "all_reduce";
    case Kind::kBroadcast:
      return "broadcast";
  }
  return "?";
}

std::string describe(const Post& post) {
  return c10::str(name_of(static_cast<Kind>(post.operation)), "(", post.count, " x ",
                  c10::toString(static_cast<at::ScalarType>(post.dtype)), ")");
}

/// Stands for how a buffer is cut.
uint64_t key_of(const shard::Segments& segments) {
  uint64_t key = 0;
  for (int64_t r = 0; r < segments.active(); ++r) {
    key = (key ^ static_cast<uint64_t>(segments.length(r))) * 0x9E3779B97F4A7C15ull + 1;
  }
  return key;
}

}  // namespace

/// What the channel, the collectives in flight and the buffers share.
class ShmChannel::State : public std::enable_shared_from_this<State> {
 public:
  State(const Rendezvous& rendezvous, Peers peers)
      : origin_{"shm", rendezvous.name, rendezvous.rank, rendezvous.size, rendezvous.timeout},
        peers_(std::move(peers)),
        arena_(Peers::kBoardBytes, peers_.own_bytes()) {}

  /// A collective, from its issue until its result is there.
  struct Operation {
    Kind kind;
    uint32_t number = 0;
    at::Tensor out{}, in{};
    std::optional<shard::Segments> segments{};
    std::shared_ptr<Placement> place{};  // of a gather without `out`
    ReduceOp reduce = ReduceOp::kSum;
    int root = 0;
    int seen = 0;          // peers whose posts have come, in order from this rank on
    bool exposed = false;  // peers may be reading `in`, wherever that lies
    bool done = false;     // the result is there

    void drop() {
      out = at::Tensor();
      if (!exposed) in = at::Tensor();
      place.reset();
    }
  };
  using OperationPtr = std::shared_ptr<Operation>;

  std::unique_ptr<Pending> issue(Operation operation, bool contributes, uint64_t layout, int64_t count);
  /// Works on the operations up to `wanted`, in order, as posts come. False: `deadline` came first.
  bool progress(OperationPtr wanted, Clock::time_point deadline);  // a copy: it leaves the queue on the way
  /// What the collective was given is its owner's again: whoever has not read it finds a copy.
  void settle(const OperationPtr& operation);
  at::Tensor buffer(int64_t nbytes);
  /// The rank that the oldest collective in flight waits for.
  int awaited() const;

  const Origin& origin() const { return origin_; }
  /// Ends the channel: whatever is waited for, issued or asked for from now on fails with `error`.
  void fail(std::exception_ptr error);
  /// The channel is closed: nothing is issued any more.
  void close();

 private:
  bool advance(Operation& operation, Clock::time_point deadline);
  void check(const Operation& operation, int peer);
  void finish(Operation& operation);
  bool read_by_all(uint32_t number) const;
  const char* mapped(const Operation& operation, int peer) const;
  bool read(const Operation& operation, int peer, int64_t begin, const std::vector<Piece>& pieces) const;
  void take(const Operation& operation, int peer, const std::vector<Piece>& pieces) const;
  void take_segment(const Operation& operation, int peer) const;
  void reduce(const Operation& operation, int64_t begin, int64_t count) const;
  std::exception_ptr hide(Operation& operation);
  uint64_t copy_to_segment(uint32_t number, const at::Tensor& tensor);
  void take_back();
  void wait_for_line();

  const Origin origin_;
  Peers peers_;
  Arena arena_;
  uint32_t issued_ = 0;
  std::deque<OperationPtr> in_flight_;
  std::vector<OperationPtr> exposed_;
  const base::BufferPool staging_;
  std::exception_ptr broken_;  // an error ends the channel: peers may be anywhere

  /// What peers may still be reading.
  struct Lent {
    uint32_t number;
    std::optional<uint64_t> block;
    at::Tensor tensor;
  };
  void lend(Lent contribution) {
    std::lock_guard lock(mutex_);
    lent_.push_back(std::move(contribution));
  }
  std::deque<Lent> lent_;
  std::mutex mutex_;  // buffers may be asked for while another thread uses the channel
};

namespace {

class ShmPending final : public Pending {
 public:
  ShmPending(std::shared_ptr<ShmChannel::State> state, ShmChannel::State::OperationPtr operation)
      : state_(std::move(state)), operation_(std::move(operation)) {}
  ~ShmPending() override {
    try {
      wait();
    } catch (...) {  // nobody is left to hear of it
    }
  }

  void wait() override {
    const auto& origin = state_->origin();
    translating_errors(origin, name_of(operation_->kind), [&] {
      if (wait_until(Clock::now() + origin.timeout)) return;
      state_->fail(std::make_exception_ptr(c10d::TimeoutError(
          {__func__, __FILE__, __LINE__}, c10::str("timed out; rank ", state_->awaited(), " did not come"))));
      state_->progress(operation_, {});
    });
  }
  bool wait_for(std::chrono::milliseconds limit) override {
    return translating_errors(state_->origin(), name_of(operation_->kind),
                              [&] { return wait_until(Clock::now() + limit); });
  }

 private:
  bool wait_until(Clock::time_point deadline) {
    if (!operation_->done && !state_->progress(operation_, deadline)) return false;
    if (operation_->exposed) state_->settle(operation_);
    return true;
  }

  std::shared_ptr<ShmChannel::State> state_;
  ShmChannel::State::OperationPtr operation_;
};

}  // namespace

std::unique_ptr<Pending> ShmChannel::State::issue(Operation given, bool contributes, uint64_t layout, int64_t count) {
  return translating_errors(origin_, name_of(given.kind), [&]() -> std::unique_ptr<Pending> {
    if (broken_) std::rethrow_exception(broken_);
    TORCH_CHECK(given.in.is_cpu(), "the shm engine carries CPU tensors, got ", given.in.device());
    take_back();
    wait_for_line();
    auto operation = std::make_shared<Operation>(std::move(given));
    operation->number = issued_;
    auto& board = peers_.board(origin_.rank);
    auto& line = board.line(operation->number);
    line.layout = layout;
    line.count = static_cast<uint64_t>(count);
    line.operation = static_cast<int32_t>(operation->kind);
    line.dtype = static_cast<int32_t>(operation->in.scalar_type());
    if (contributes && operation->in.nbytes() > 0) {
      const auto* from = static_cast<const char*>(operation->in.const_data_ptr());
      const char* begin = peers_.own_data();
      // What came from buffer() is the channel's from now on; everything else is its owner's to write again.
      if (from >= begin && from < begin + peers_.own_bytes()) {
        line.lies_in_segment(static_cast<uint64_t>(from - begin));
        lend({operation->number, std::nullopt, operation->in});
      } else if (peers_.direct() && static_cast<int64_t>(operation->in.nbytes()) >= kDirect &&
                 operation->kind != Kind::kAllReduce) {
        line.lies_in_tensor(from);
        operation->exposed = true;
        exposed_.push_back(operation);
      } else {
        line.lies_in_segment(copy_to_segment(operation->number, operation->in));
      }
    }
    in_flight_.push_back(operation);
    board.post(issued_++);
    return std::make_unique<ShmPending>(shared_from_this(), std::move(operation));
  });
}

bool ShmChannel::State::progress(OperationPtr wanted, Clock::time_point deadline) {
  if (broken_ && !wanted->done) std::rethrow_exception(broken_);
  try {
    while (!wanted->done) {
      auto& next = *in_flight_.front();
      if (!advance(next, deadline)) return false;
      next.done = true;
      next.drop();
      peers_.board(origin_.rank).done.store(next.number + 1, std::memory_order_release);
      in_flight_.pop_front();
    }
  } catch (...) {
    fail(std::current_exception());
    throw;
  }
  return true;
}

void ShmChannel::State::fail(std::exception_ptr error) {
  std::deque<Lent> lent;
  {
    std::lock_guard lock(mutex_);
    broken_ = std::move(error);
    lent.swap(lent_);
  }
  // Peers may still want what was contributed: each finds its own error, or none.
  for (const auto& operation : std::exchange(exposed_, {})) hide(*operation);
  // Tensors of buffer() hold this object, so it must not hold them for ever.
  for (auto& operation : in_flight_) operation->drop();
}

void ShmChannel::State::close() {
  peers_.leave();
  std::deque<Lent> lent;
  std::lock_guard lock(mutex_);
  lent.swap(lent_);
}

int ShmChannel::State::awaited() const {
  return in_flight_.empty() ? origin_.rank : (origin_.rank + in_flight_.front()->seen) % origin_.size;
}

bool ShmChannel::State::advance(Operation& operation, Clock::time_point deadline) {
  // Each rank begins behind itself, so that they do not all read from one.
  for (; operation.seen < origin_.size; ++operation.seen) {
    const int peer = (origin_.rank + operation.seen) % origin_.size;
    if (!peers_.wait_for_post(peer, operation.number, deadline)) return false;
    check(operation, peer);
    if (operation.kind == Kind::kAllGather) take_segment(operation, peer);
  }
  finish(operation);
  return true;
}

void ShmChannel::State::check(const Operation& operation, int peer) {
  const auto& mine = peers_.board(origin_.rank).line(operation.number);
  const auto& theirs = peers_.board(peer).line(operation.number);
  if (mine.operation == theirs.operation && mine.dtype == theirs.dtype && mine.count == theirs.count &&
      mine.layout == theirs.layout) {
    return;
  }
  throw std::runtime_error(c10::str("the ranks disagree on collective number ", operation.number, ": rank ", peer,
                                    " calls ", describe(theirs), ", rank ", origin_.rank, " calls ", describe(mine)));
}

void ShmChannel::State::finish(Operation& operation) {
  switch (operation.kind) {
    case Kind::kAllGather:
      return;
    case Kind::kReduceScatter:
      return reduce(operation, operation.segments->begin(origin_.rank), operation.out.numel());
    case Kind::kAllReduce:
      return reduce(operation, 0, operation.out.numel());
    case Kind::kBroadcast:
      if (origin_.rank == operation.root) return;
      return take(operation, operation.root,
                  {{operation.out.data_ptr(), static_cast<int64_t>(operation.out.nbytes())}});
  }
}

// --- contributions --------------------------------------------------------------------------------------------------

/// A contribution in a segment, or this rank's own; null if it lies in a peer's tensor.
const char* ShmChannel::State::mapped(const Operation& operation, int peer) const {
  if (peer == origin_.rank && operation.exposed) return static_cast<const char*>(operation.in.const_data_ptr());
  const auto& post = peers_.board(peer).line(operation.number);
  switch (post.source.load(std::memory_order_acquire)) {
    case Source::kSegment:
      return peers_.data(peer) + post.offset;
    case Source::kTensor:
      return nullptr;
    case Source::kGone:
      break;
  }
  throw std::runtime_error(c10::str("rank ", peer, " had no room for its part when rank ", origin_.rank, " was late"));
}

/// Reads what mapped() does not show. False: it has been moved meanwhile, so that mapped() shows it.
bool ShmChannel::State::read(const Operation& operation, int peer, int64_t begin,
                             const std::vector<Piece>& pieces) const {
  const auto& post = peers_.board(peer).line(operation.number);
  const bool there = peers_.read(peer, post.address + static_cast<uint64_t>(begin), pieces);
  const bool ended = peers_.has_ended(peer);  // before the look: a rank that moved it, and then ended, is no fault
  if (!post.was_there()) return false;
  if (there && !ended) return true;
  throw std::runtime_error(c10::str("rank ", peer, ended ? " has ended" : "'s memory cannot be read any more"));
}

void ShmChannel::State::take(const Operation& operation, int peer, const std::vector<Piece>& pieces) const {
  const char* from = mapped(operation, peer);
  if (!from) {
    if (read(operation, peer, 0, pieces)) return;
    from = mapped(operation, peer);
  }
  for (const auto& piece : pieces) {
    if (piece.to != from) std::memcpy(piece.to, from, static_cast<size_t>(piece.bytes));
    from += piece.bytes;
  }
}

void ShmChannel::State::take_segment(const Operation& operation, int peer) const {
  const auto& segments = *operation.segments;
  const auto width = static_cast<int64_t>(operation.in.element_size());
  const int64_t bytes = segments.length(peer) * width;
  if (bytes == 0) return;
  std::vector<Piece> pieces;
  if (!operation.place) {
    pieces.push_back({static_cast<char*>(operation.out.data_ptr()) + segments.begin(peer) * width, bytes});
  } else if (const char* from = mapped(operation, peer)) {
    return operation.place->segment(peer, from);
  } else if (!operation.place->pieces(peer, pieces)) {
    const auto whole = staging_.take(bytes, at::TensorOptions(at::kByte));
    take(operation, peer, {{whole.data_ptr(), bytes}});
    return operation.place->segment(peer, whole.const_data_ptr());
  }
  take(operation, peer, pieces);
}

void ShmChannel::State::reduce(const Operation& operation, int64_t begin, int64_t count) const {
  const auto ranks = static_cast<size_t>(origin_.size);
  const auto width = static_cast<int64_t>(operation.out.element_size()), bytes = count * width;
  std::vector<const char*> shown;  // null: read a little at a time, so that it is in the cache when it is added
  if (bytes == 0) return;
  for (int peer = 0; peer < origin_.size; ++peer) shown.push_back(mapped(operation, peer));
  const bool all = std::find(shown.begin(), shown.end(), nullptr) == shown.end();
  const int64_t at_once = all ? bytes : std::min(bytes, kReducedAtOnce);
  const auto bounce = staging_.take(all ? 0 : origin_.size * at_once, at::TensorOptions(at::kByte));
  std::vector<const void*> parts(ranks);
  for (int64_t done = 0; done < bytes; done += at_once) {
    const int64_t n = std::min(at_once, bytes - done), from = begin * width + done;
    for (size_t peer = 0; peer < ranks; ++peer) {
      auto* copy = static_cast<char*>(bounce.data_ptr()) + static_cast<int64_t>(peer) * at_once;
      if (!shown[peer] && !read(operation, static_cast<int>(peer), from, {Piece{copy, n}})) {
        shown[peer] = mapped(operation, static_cast<int>(peer));
      }
      parts[peer] = shown[peer] ? shown[peer] + from : copy;
    }
    reduce_parts(static_cast<char*>(operation.out.data_ptr()) + done, parts, n / width, operation.out.scalar_type(),
                 operation.reduce);
  }
}

bool ShmChannel::State::read_by_all(uint32_t number) const {
  for (int peer = 0; peer < origin_.size; ++peer) {
    if (!peers_.board(peer).has_done(number)) return false;
  }
  return true;
}

uint64_t ShmChannel::State::copy_to_segment(uint32_t number, const at::Tensor& tensor) {
  const uint64_t block = arena_.allocate(tensor.nbytes());
  std::memcpy(peers_.own_data() + block, tensor.const_data_ptr(), tensor.nbytes());
  lend({number, block, {}});
  return block;
}

void ShmChannel::State::settle(const OperationPtr& operation) {
  // A peer that is about to read costs less than a copy. One that is late does not: it is waited for as long as
  // the copy takes.
  const auto bytes = static_cast<int64_t>(operation->in.nbytes());
  const auto until = Clock::now() + std::chrono::nanoseconds(bytes / kCopySpeed);
  while (!read_by_all(operation->number) && Clock::now() < until) std::this_thread::yield();
  exposed_.erase(std::find(exposed_.begin(), exposed_.end(), operation));
  if (const auto error = hide(*operation)) {
    fail(error);
    std::rethrow_exception(error);
  }
}

/// Moves what an operation exposes to the segment, unless all have read it. If there is no room, it is gone: why.
std::exception_ptr ShmChannel::State::hide(Operation& operation) {
  std::exception_ptr error;
  auto& post = peers_.board(origin_.rank).line(operation.number);
  if (!read_by_all(operation.number)) {
    try {
      post.lies_in_segment(copy_to_segment(operation.number, operation.in));
    } catch (...) {
      post.is_gone();
      error = std::current_exception();
    }
  }
  operation.exposed = false;
  operation.in.reset();
  return error;
}

void ShmChannel::State::take_back() {
  std::deque<Lent> free;  // tensors go outside of the lock
  {
    std::lock_guard lock(mutex_);
    while (!lent_.empty() && read_by_all(lent_.front().number)) {
      free.push_back(std::move(lent_.front()));
      lent_.pop_front();
    }
  }
  for (const auto& each : free) {
    if (each.block) arena_.free(*each.block);
  }
}

void ShmChannel::State::wait_for_line() {
  const uint32_t before = issued_ - Board::kLines;  // whose line is the next one's
  const auto deadline = Clock::now() + origin_.timeout;
  // This rank too may have issued a board full without waiting for any.
  if (!peers_.board(origin_.rank).has_done(before)) progress(in_flight_.front(), deadline);
  for (int peer = 0; peer < origin_.size; ++peer) {
    while (!peers_.board(peer).has_done(before)) {
      if (Clock::now() >= deadline) {
        throw c10d::TimeoutError(
            {__func__, __FILE__, __LINE__},
            c10::str("timed out; rank ", peer, " has ", Board::kLines, " collectives still to take part in"));
      }
      // The peer may have gone: this throws then.
      peers_.wait_for_post(peer, issued_, std::min(deadline, Clock::now() + std::chrono::milliseconds(1)));
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

at::Tensor ShmChannel::State::buffer(int64_t nbytes) {
  {
    std::lock_guard lock(mutex_);
    if (broken_) std::rethrow_exception(broken_);
  }
  take_back();
  const uint64_t block = arena_.allocate(static_cast<uint64_t>(nbytes));
  const auto give_back = [state = shared_from_this(), block](void*) { state->arena_.free(block); };
  return at::from_blob(peers_.own_data() + block, {nbytes}, give_back, at::TensorOptions().dtype(at::kByte));
}

// --- the channel ----------------------------------------------------------------------------------------------------

ShmChannel::ShmChannel(const Rendezvous& rendezvous, Peers peers)
    : state_(std::make_shared<State>(rendezvous, std::move(peers))) {}

ShmChannel::~ShmChannel() { state_->close(); }

int ShmChannel::rank() const { return state_->origin().rank; }
int ShmChannel::size() const { return state_->origin().size; }
const std::string& ShmChannel::name() const { return state_->origin().name; }

std::unique_ptr<Pending> ShmChannel::all_gather(const at::Tensor& out, const at::Tensor& mine,
                                                const shard::Segments& segments) {
  return state_->issue({.kind = Kind::kAllGather, .out = out, .in = mine, .segments = segments}, true, key_of(segments),
                       segments.total());
}

std::unique_ptr<Pending> ShmChannel::all_gather_to(std::shared_ptr<Placement> place, const at::Tensor& mine,
                                                   const shard::Segments& segments) {
  return state_->issue({.kind = Kind::kAllGather, .in = mine, .segments = segments, .place = std::move(place)}, true,
                       key_of(segments), segments.total());
}

std::unique_ptr<Pending> ShmChannel::all_gather_even(const at::Tensor& out, const at::Tensor& mine) {
  return ShmChannel::all_gather(out, mine, shard::Segments(size(), mine.numel()));
}

std::unique_ptr<Pending> ShmChannel::reduce_scatter(const at::Tensor& out, const at::Tensor& in,
                                                    const shard::Segments& segments) {
  return state_->issue({.kind = Kind::kReduceScatter, .out = out, .in = in, .segments = segments}, true,
                       key_of(segments), segments.total());
}

std::unique_ptr<Pending> ShmChannel::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  return state_->issue({.kind = Kind::kAllReduce, .out = tensor, .in = tensor, .reduce = op}, true,
                       static_cast<uint64_t>(op), tensor.numel());
}

std::unique_ptr<Pending> ShmChannel::broadcast(const at::Tensor& tensor, int root) {
  return state_->issue({.kind = Kind::kBroadcast, .out = tensor, .in = tensor, .root = root}, root == rank(),
                       static_cast<uint64_t>(root), tensor.numel());
}

at::Tensor ShmChannel::buffer(int64_t nbytes, c10::Device device) {
  TORCH_CHECK(device.is_cpu(), "the shm engine carries CPU tensors, got ", device);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return translating_errors(state_->origin(), "buffer", [&] { return state_->buffer(nbytes); });
}

}  // namespace fsdp::comm::shm

namespace fsdp::comm {

std::shared_ptr<Channel> open_shm(const Rendezvous& rendezvous) {
  std::string reason;
  auto peers = shm::Peers::meet(rendezvous, reason);
  if (!peers) {
    throw NotSupported(c10::str("the engine 'shm' needs all ranks of channel '", rendezvous.name,
                                "' on one host, in one process-id space: ", reason,
                                ". Use 'gloo', or leave the engine "
                                "empty to have it chosen"));
  }
  return std::make_shared<shm::ShmChannel>(rendezvous, std::move(*peers));
}

}  // namespace fsdp::comm
