#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/backend_channel.h"
#include "comm/backends/backends.h"
#include "comm/copy.h"

namespace fsdp::comm {
namespace {

/// What one rank asks for.
struct Call {
  c10d::OpType type;
  const char* operation;
  at::Tensor in, out;
  c10d::ReduceOp::RedOpType reduce = c10d::ReduceOp::SUM;
  int64_t root = 0;

  bool matches(const Call& other) const {
    return type == other.type && in.numel() == other.in.numel() && in.scalar_type() == other.in.scalar_type() &&
           out.numel() == other.out.numel() && reduce == other.reduce && root == other.root;
  }
  std::string describe() const {
    return c10::str(operation, "(", in.numel(), " x ", c10::toString(in.scalar_type()), " -> ", out.numel(),
                    ", reduce ", static_cast<int>(reduce), ", root ", root, ")");
  }
};

void combine(at::Tensor& into, const at::Tensor& other, c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
      into.add_(other);
      return;
    case c10d::ReduceOp::MAX:
      into.copy_(at::maximum(into, other));
      return;
    case c10d::ReduceOp::MIN:
      into.copy_(at::minimum(into, other));
      return;
    default:
      C10_THROW_ERROR(NotImplementedError, "the in-process engine reduces by sum, max and min");
  }
}

/// Elements [begin, begin + length) of every rank's input, reduced in rank order.
at::Tensor reduce(const std::vector<std::optional<Call>>& calls, int64_t begin, int64_t length) {
  const auto part = [&](const Call& call) { return call.in.view(-1).narrow(0, begin, length); };
  auto total = part(*calls[0]).clone();
  for (size_t rank = 1; rank < calls.size(); ++rank) {
    combine(total, part(*calls[rank]), calls[0]->reduce);
  }
  return total;
}

void move_data(const std::vector<std::optional<Call>>& calls) {
  const auto& first = *calls[0];
  const auto in_length = first.in.numel(), out_length = first.out.numel();
  switch (first.type) {
    case c10d::OpType::_ALLGATHER_BASE:
      for (const auto& to : calls) {
        for (size_t rank = 0; rank < calls.size(); ++rank) {
          copy_elements(to->out, rank * in_length, calls[rank]->in, 0, in_length);
        }
      }
      return;
    case c10d::OpType::_REDUCE_SCATTER_BASE: {
      // All sums before all writes: a rank's output may be a part of its own input.
      std::vector<at::Tensor> sums;
      for (size_t rank = 0; rank < calls.size(); ++rank) {
        sums.push_back(reduce(calls, rank * out_length, out_length));
      }
      for (size_t rank = 0; rank < calls.size(); ++rank) {
        copy_elements(calls[rank]->out, 0, sums[rank], 0, out_length);
      }
      return;
    }
    case c10d::OpType::ALLREDUCE: {
      const auto total = reduce(calls, 0, in_length);
      for (const auto& to : calls) {
        copy_elements(to->out, 0, total, 0, out_length);
      }
      return;
    }
    case c10d::OpType::BROADCAST:
      for (const auto& to : calls) {
        copy_elements(to->out, 0, calls[first.root]->in, 0, in_length);
      }
      return;
    default:
      return;
  }
}

/// The n-th collective of a channel: one call a rank. All fields are guarded by the hub's mutex, but for the calls
/// while the data moves: nobody else touches them then.
struct Meeting {
  explicit Meeting(int size) : calls(size) {}
  std::vector<std::optional<Call>> calls;
  int arrived = 0;
  bool done = false;
  std::exception_ptr error;
};

/// Where the ranks of a channel meet. Whoever comes last moves everybody's data, so nobody ever waits for a peer to
/// wait: ranks may wait in any order.
class Hub {
 public:
  explicit Hub(int size) : size_(size) {}

  std::shared_ptr<Meeting> join(int rank, uint64_t number, Call call) {
    std::shared_ptr<Meeting> meeting;
    {
      std::lock_guard lock(mutex_);
      auto& slot = meetings_[number];
      if (!slot) {
        slot = std::make_shared<Meeting>(size_);
      }
      meeting = slot;
      check(*meeting, rank, number, call);
      meeting->calls[rank] = std::move(call);
      if (++meeting->arrived == size_) {
        meetings_.erase(number);
      }
      if (meeting->done || meeting->arrived < size_) {
        return meeting;
      }
    }
    std::exception_ptr error;
    try {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      move_data(meeting->calls);
    } catch (...) {
      error = std::current_exception();
    }
    std::lock_guard lock(mutex_);
    finish(*meeting, error);
    return meeting;
  }

  void wait(Meeting& meeting, std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    const auto is_done = [&] { return meeting.done; };
    if (!changed_.wait_for(lock, timeout, is_done)) {
      if (meeting.arrived == size_) {
        changed_.wait(lock, is_done);  // the data is moving
      } else {
        // From here on nobody may write into this rank's tensors: a late peer finds the meeting failed.
        fail<c10d::TimeoutError>(meeting, c10::str("timed out; ", attendance(meeting)));
      }
    }
    if (meeting.error) {
      std::rethrow_exception(meeting.error);
    }
  }

  bool is_done(const Meeting& meeting) {
    std::lock_guard lock(mutex_);
    return meeting.done;
  }

  /// `rank` will issue nothing any more: whoever waits for it learns it now instead of at the timeout.
  void leave(int rank) {
    std::lock_guard lock(mutex_);
    left_.insert(rank);
    for (auto& [number, meeting] : meetings_) {
      check_left(*meeting);
    }
  }

 private:
  void check(Meeting& meeting, int rank, uint64_t number, const Call& call) {
    for (size_t peer = 0; peer < meeting.calls.size() && !meeting.done; ++peer) {
      const auto& other = meeting.calls[peer];
      if (other && !other->matches(call)) {
        fail<c10::DistBackendError>(
            meeting, c10::str("the ranks disagree on collective number ", number, ": rank ", peer, " calls ",
                              other->describe(), ", rank ", rank, " calls ", call.describe()));
      }
    }
    check_left(meeting, rank);
  }

  void check_left(Meeting& meeting, int joining = -1) {
    for (const int peer : left_) {
      if (peer != joining && !meeting.calls[peer] && !meeting.done) {
        fail<c10::DistBackendError>(meeting, c10::str("rank ", peer, " has left the channel"));
      }
    }
  }

  template <class ErrorType>
  void fail(Meeting& meeting, const std::string& what) {
    finish(meeting, std::make_exception_ptr(ErrorType({__func__, __FILE__, __LINE__}, what)));
  }

  void finish(Meeting& meeting, std::exception_ptr error) {
    meeting.error = std::move(error);
    meeting.done = true;
    // The tensors are given back now, not when the slowest rank has let go of the meeting.
    for (auto& call : meeting.calls) {
      if (call) {
        call->in = call->out = at::Tensor();
      }
    }
    changed_.notify_all();
  }

  static std::string attendance(const Meeting& meeting) {
    std::vector<int> missing;
    for (size_t rank = 0; rank < meeting.calls.size(); ++rank) {
      if (!meeting.calls[rank]) {
        missing.push_back(static_cast<int>(rank));
      }
    }
    return c10::str("rank ", c10::Join(", ", missing), " did not come");
  }

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, std::shared_ptr<Meeting>> meetings_;  // those that somebody still has to join
  std::set<int> left_;
};

class InprocWork final : public c10d::Work {
 public:
  InprocWork(int rank, c10d::OpType type, std::shared_ptr<Hub> hub, std::shared_ptr<Meeting> meeting,
             std::chrono::milliseconds timeout)
      : Work(rank, type), hub_(std::move(hub)), meeting_(std::move(meeting)), timeout_(timeout) {}

  bool wait(std::chrono::milliseconds timeout) override {
    hub_->wait(*meeting_, timeout == kNoTimeout ? timeout_ : timeout);
    return true;
  }
  bool isCompleted() override { return hub_->is_done(*meeting_); }

 private:
  std::shared_ptr<Hub> hub_;
  std::shared_ptr<Meeting> meeting_;
  std::chrono::milliseconds timeout_;
};

class InprocBackend final : public c10d::Backend {
 public:
  InprocBackend(int rank, int size, std::shared_ptr<Hub> hub, std::chrono::milliseconds timeout)
      : Backend(rank, size), hub_(std::move(hub)), timeout_(timeout) {}
  ~InprocBackend() override { hub_->leave(getRank()); }

  const std::string getBackendName() const override { return "inproc"; }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& out, at::Tensor& in,
                                                 const c10d::AllgatherOptions&) override {
    return issue({c10d::OpType::_ALLGATHER_BASE, "all_gather", in, out});
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                                                      const c10d::ReduceScatterOptions& options) override {
    return issue({c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", in, out, options.reduceOp});
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    return issue({c10d::OpType::ALLREDUCE, "all_reduce", tensors.at(0), tensors.at(0), options.reduceOp});
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return issue(
        {c10d::OpType::BROADCAST, "broadcast", tensors.at(0), tensors.at(0), c10d::ReduceOp::SUM, options.rootRank});
  }

 private:
  c10::intrusive_ptr<c10d::Work> issue(Call call) {
    const auto type = call.type;
    auto meeting = hub_->join(getRank(), issued_++, std::move(call));
    return c10::make_intrusive<InprocWork>(getRank(), type, hub_, std::move(meeting), timeout_);
  }

  std::shared_ptr<Hub> hub_;
  std::chrono::milliseconds timeout_;
  uint64_t issued_ = 0;
};

class InprocChannel final : public BackendChannel {
 public:
  using BackendChannel::BackendChannel;
  bool one_host() const override { return true; }
};

/// Hubs between their making by rank 0 and the arrival of their last member. The store carries the number.
class Lobby {
 public:
  static Lobby& instance() {
    static auto* lobby = new Lobby;
    return *lobby;
  }

  std::string open(int size) {
    std::lock_guard lock(mutex_);
    auto key = std::to_string(++last_);
    hubs_[key] = {std::make_shared<Hub>(size), size};
    return key;
  }

  std::shared_ptr<Hub> enter(const std::string& key) {
    std::lock_guard lock(mutex_);
    auto& [hub, missing] = hubs_.at(key);
    auto entered = hub;
    if (--missing == 0) {
      hubs_.erase(key);
    }
    return entered;
  }

 private:
  std::mutex mutex_;
  uint64_t last_ = 0;
  std::unordered_map<std::string, std::pair<std::shared_ptr<Hub>, int>> hubs_;
};

}  // namespace

std::shared_ptr<Channel> open_inproc(const Rendezvous& rendezvous) {
  auto& store = *rendezvous.store;
  std::string key;
  if (rendezvous.rank == 0) {
    key = Lobby::instance().open(rendezvous.size);
    store.set("hub", key);
  } else {
    store.wait({"hub"}, rendezvous.timeout);
    key = store.get_to_str("hub");
  }
  auto hub = Lobby::instance().enter(key);
  return std::make_shared<InprocChannel>(
      "inproc", rendezvous,
      c10::make_intrusive<InprocBackend>(rendezvous.rank, rendezvous.size, std::move(hub), rendezvous.timeout));
}

}  // namespace fsdp::comm
