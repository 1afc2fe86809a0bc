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
    int seen = 0;  // peers whose posts have come, in order from this rank on
    bool done = false;

    void drop() {
      out = in = at::Tensor();
      place.reset();
    }
  };
  using OperationPtr = std::shared_ptr<Operation>;

  std::unique_ptr<Pending> issue(Operation operation, bool contributes, uint64_t layout, int64_t count);
  /// Works on the operations up to `wanted`, in order, as posts come. False: `deadline` came first.
  bool progress(OperationPtr wanted, Clock::time_point deadline);  // a copy: it leaves the queue on the way
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
  const char* contribution(const Operation& operation, int peer) const {
    return peers_.data(peer) + peers_.board(peer).line(operation.number).offset;
  }
  void take_back();
  void wait_for_line();

  const Origin origin_;
  Peers peers_;
  Arena arena_;
  uint32_t issued_ = 0;
  std::deque<OperationPtr> in_flight_;
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
      if (operation_->done || state_->progress(operation_, Clock::now() + origin.timeout)) return;
      state_->fail(std::make_exception_ptr(c10d::TimeoutError(
          {__func__, __FILE__, __LINE__}, c10::str("timed out; rank ", state_->awaited(), " did not come"))));
      state_->progress(operation_, {});
    });
  }
  bool wait_for(std::chrono::milliseconds limit) override {
    return operation_->done || translating_errors(state_->origin(), name_of(operation_->kind),
                                                  [&] { return state_->progress(operation_, Clock::now() + limit); });
  }

 private:
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
    line = {0, layout, static_cast<uint64_t>(count), static_cast<int32_t>(operation->kind),
            static_cast<int32_t>(operation->in.scalar_type())};
    if (contributes && operation->in.nbytes() > 0) {
      const auto* from = static_cast<const char*>(operation->in.const_data_ptr());
      const char* begin = peers_.own_data();
      // What came from buffer() is the channel's from now on; everything else is its owner's to write again.
      if (from >= begin && from < begin + peers_.own_bytes()) {
        line.offset = static_cast<uint64_t>(from - begin);
        lend({operation->number, std::nullopt, operation->in});
      } else {
        line.offset = arena_.allocate(operation->in.nbytes());
        std::memcpy(peers_.own_data() + line.offset, from, operation->in.nbytes());
        lend({operation->number, line.offset, {}});
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
    if (operation.kind == Kind::kAllGather) {
      const auto& segments = *operation.segments;
      const auto width = static_cast<int64_t>(operation.in.element_size());
      const int64_t length = segments.length(peer) * width;
      if (length == 0) continue;
      if (operation.place) {
        operation.place->segment(peer, contribution(operation, peer));
      } else {
        auto* to = static_cast<char*>(operation.out.data_ptr()) + segments.begin(peer) * width;
        std::memcpy(to, contribution(operation, peer), static_cast<size_t>(length));
      }
    }
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
  const auto dtype = operation.in.scalar_type();
  const auto reduce = [&](int64_t begin, int64_t count) {
    std::vector<const void*> parts;
    for (int rank = 0; rank < origin_.size; ++rank) parts.push_back(contribution(operation, rank) + begin);
    if (count > 0) reduce_parts(operation.out.data_ptr(), parts, count, dtype, operation.reduce);
  };
  switch (operation.kind) {
    case Kind::kAllGather:
      return;
    case Kind::kReduceScatter:
      return reduce(operation.segments->begin(origin_.rank) * static_cast<int64_t>(operation.out.element_size()),
                    operation.out.numel());
    case Kind::kAllReduce:
      return reduce(0, operation.out.numel());
    case Kind::kBroadcast:
      if (origin_.rank != operation.root && operation.out.nbytes() > 0) {
        std::memcpy(operation.out.data_ptr(), contribution(operation, operation.root), operation.out.nbytes());
      }
      return;
  }
}

void ShmChannel::State::take_back() {
  const auto read_by_all = [&](uint32_t number) {
    for (int peer = 0; peer < origin_.size; ++peer) {
      if (!peers_.board(peer).has_done(number)) return false;
    }
    return true;
  };
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
