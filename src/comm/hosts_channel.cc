#include "comm/hosts_channel.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <unistd.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include "base/huge_pages.h"
#include "comm/origin.h"
#include "comm/solo_channel.h"
#include "shard/layout.h"

namespace fsdp::comm {

int Hosts::of(int rank) const {
  return static_cast<int>(std::upper_bound(first.begin(), first.end(), rank) - first.begin()) - 1;
}

Hosts Hosts::of_words(const std::vector<std::string>& words, int rank) {
  Hosts hosts;
  std::vector<std::string> seen;
  for (size_t r = 0; r < words.size(); ++r) {
    if (!seen.empty() && words[r] == seen.back()) continue;
    if (std::find(seen.begin(), seen.end(), words[r]) != seen.end()) return {};
    seen.push_back(words[r]);
    hosts.first.push_back(static_cast<int>(r));
  }
  hosts.first.push_back(static_cast<int>(words.size()));
  hosts.mine = hosts.of(rank);
  return hosts;
}

namespace {

/// Copies a part of the one segment that is gathered, or nothing.
class Part final : public Placement {
 public:
  Part(void* to, int64_t begin, int64_t bytes) : to_(to), begin_(begin), bytes_(bytes) {}
  void segment(int64_t, const void* bytes) override { whole(bytes); }
  void whole(const void* bytes) override {
    if (bytes_ > 0) std::memcpy(to_, static_cast<const char*>(bytes) + begin_, static_cast<size_t>(bytes_));
  }

 private:
  void* to_;
  int64_t begin_, bytes_;
};

/// Puts every segment into its place in `to`; null: nowhere.
class Joined final : public Placement {
 public:
  Joined(char* to, shard::Segments segments, int64_t width) : to_(to), segments_(std::move(segments)), width_(width) {}
  void segment(int64_t rank, const void* bytes) override {
    if (to_) std::memcpy(to_ + segments_.begin(rank) * width_, bytes, segments_.length(rank) * width_);
  }
  void whole(const void* bytes) override {
    if (to_) std::memcpy(to_, bytes, segments_.total() * width_);
  }
  bool pieces(int64_t rank, std::vector<Piece>& into) override {
    if (to_) into.push_back({to_ + segments_.begin(rank) * width_, segments_.length(rank) * width_});
    return true;
  }

 private:
  char* to_;
  shard::Segments segments_;
  int64_t width_;
};

char* bytes_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

}  // namespace

/// The channels below, and the thread that runs collectives on them.
class HostsChannel::State {
 public:
  State(std::string engine, const Rendezvous& rendezvous, Hosts hosts, std::shared_ptr<Channel> within,
        std::shared_ptr<Channel> across);
  /// No Pending is left by now, so no job is.
  ~State() {
    {
      std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  /// A collective from its issue on. Whoever waits for it drops it, and with it the tensors that `act` holds.
  struct Job {
    const char* operation;
    std::function<void()> act;
    bool done = false;
    std::exception_ptr error{};
  };

  std::shared_ptr<Job> issue(const char* operation, std::function<void()> act) {
    auto job = std::make_shared<Job>(Job{operation, std::move(act)});
    {
      std::lock_guard lock(mutex_);
      if (broken_) std::rethrow_exception(broken_);
      queue_.push_back(job);
    }
    changed_.notify_all();
    return job;
  }

  bool wait_until(const Job& job, std::optional<std::chrono::steady_clock::time_point> until) {
    std::unique_lock lock(mutex_);
    const auto done = [&] { return job.done; };
    if (!until) {
      changed_.wait(lock, done);  // what the job waits for is bounded
    } else if (!changed_.wait_until(lock, *until, done)) {
      return false;
    }
    if (job.error) std::rethrow_exception(job.error);
    return true;
  }

  Channel& within() const { return *within_; }
  Channel& across() const { return *across_; }
  bool first() const { return across_ != nullptr; }
  /// For buffers, which are asked for on the caller's thread.
  std::shared_ptr<Channel> within_now() {
    std::lock_guard lock(mutex_);
    if (broken_) std::rethrow_exception(broken_);
    return within_;
  }

  /// How `segments`, one a rank, are cut by hosts, and by the ranks of this host.
  shard::Segments by_host(const shard::Segments& segments) const {
    std::vector<int64_t> lengths;
    for (int host = 0; host < hosts.count(); ++host) {
      lengths.push_back(segments.begin(hosts.first[host + 1]) - segments.begin(hosts.first[host]));
    }
    return {hosts.count(), lengths};
  }
  shard::Segments of_this_host(const shard::Segments& segments) const {
    std::vector<int64_t> lengths;
    for (int rank = hosts.first[hosts.mine]; rank < hosts.first[hosts.mine + 1]; ++rank) {
      lengths.push_back(segments.length(rank));
    }
    return {hosts.ranks(hosts.mine), lengths};
  }
  /// All of `whole`, of which the first rank has all, as a gather among the ranks of this host.
  void spread(const at::Tensor& whole, int64_t numel, std::shared_ptr<Placement> place) {
    within()
        .all_gather_to(std::move(place), first() ? whole : whole.narrow(0, 0, 0),
                       shard::Segments(hosts.ranks(hosts.mine), std::vector<int64_t>{numel}))
        ->wait();
  }
  at::Tensor shared_like(const at::Tensor& tensor, int64_t numel) {
    const auto width = static_cast<int64_t>(tensor.element_size());
    return within().buffer(numel * width, tensor.device()).view(tensor.scalar_type());
  }

  const Origin origin;
  const Hosts hosts;

 private:
  void run() {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ending_ || !queue_.empty(); });
      if (queue_.empty()) return;
      auto job = queue_.front();
      auto error = broken_;
      if (!error) {
        lock.unlock();
        try {
          translating_errors(origin, job->operation, job->act);
        } catch (...) {
          error = std::current_exception();
        }
        lock.lock();
      }
      if (error && !broken_) {
        broken_ = error;
        // The others hear of it by our leaving.
        auto within = std::exchange(within_, nullptr), across = std::exchange(across_, nullptr);
        lock.unlock();
        within.reset();
        across.reset();
        lock.lock();
      }
      job->error = error;
      job->done = true;
      queue_.pop_front();
      job.reset();  // not the last reference: its Pending waits for `done`
      changed_.notify_all();
    }
  }

  std::shared_ptr<Channel> within_, across_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> queue_;
  std::exception_ptr broken_;  // an error ends the channel
  bool ending_ = false;
  std::thread thread_;
};

// Not inline: what std::thread makes of the lambda would be a symbol of the library's then.
HostsChannel::State::State(std::string engine, const Rendezvous& rendezvous, Hosts hosts,
                           std::shared_ptr<Channel> within, std::shared_ptr<Channel> across)
    : origin{std::move(engine), rendezvous.name, rendezvous.rank, rendezvous.size, rendezvous.timeout},
      hosts(std::move(hosts)),
      within_(std::move(within)),
      across_(std::move(across)),
      thread_([this] { run(); }) {}

namespace {

class JobPending final : public Pending {
 public:
  JobPending(std::shared_ptr<HostsChannel::State> state, std::shared_ptr<HostsChannel::State::Job> job)
      : state_(std::move(state)), job_(std::move(job)) {}
  ~JobPending() override {
    try {
      wait();
    } catch (...) {  // nobody is left to hear of it
    }
  }
  void wait() override { wait_until(std::nullopt); }
  bool wait_for(std::chrono::milliseconds limit) override {
    return wait_until(std::chrono::steady_clock::now() + limit);
  }

 private:
  bool wait_until(std::optional<std::chrono::steady_clock::time_point> until) {
    if (!job_) return true;
    try {
      if (!state_->wait_until(*job_, until)) return false;
    } catch (...) {
      job_.reset();
      throw;
    }
    job_.reset();
    return true;
  }

  std::shared_ptr<HostsChannel::State> state_;
  std::shared_ptr<HostsChannel::State::Job> job_;
};

std::unique_ptr<Pending> start(const std::shared_ptr<HostsChannel::State>& state, const char* operation,
                               const at::Tensor& tensor, std::function<void()> act) {
  TORCH_CHECK(tensor.is_cpu(), "channels over several hosts carry CPU tensors, got ", tensor.device());
  return std::make_unique<JobPending>(state, state->issue(operation, std::move(act)));
}

}  // namespace

HostsChannel::HostsChannel(std::string engine, const Rendezvous& rendezvous, Hosts hosts,
                           std::shared_ptr<Channel> within, std::shared_ptr<Channel> across)
    : state_(new State(std::move(engine), rendezvous, std::move(hosts), std::move(within), std::move(across)),
             // Left alone in a process that was forked from the rank's: the thread is not there.
             [owner = ::getpid()](State* state) {
               if (::getpid() == owner) delete state;
             }) {}

int HostsChannel::rank() const { return state_->origin.rank; }
int HostsChannel::size() const { return state_->origin.size; }
const std::string& HostsChannel::name() const { return state_->origin.name; }

// The first rank joins its host's segments where its peers can read them, the hosts' are exchanged into the same
// buffer, and everybody takes the whole from there.
std::unique_ptr<Pending> HostsChannel::all_gather(const at::Tensor& out, const at::Tensor& mine,
                                                  const shard::Segments& segments) {
  if (segments.total() == 0) return std::make_unique<DonePending>();
  auto& state = *state_;
  return start(state_, "all_gather", mine, [&state, out, mine, segments] {
    const auto blocks = state.by_host(segments), own = state.of_this_host(segments);
    const auto width = static_cast<int64_t>(out.element_size());
    const auto whole = state.first() ? state.shared_like(out, segments.total()) : out;
    const auto block = whole.narrow(0, blocks.begin(state.hosts.mine), own.total());
    const auto join = std::make_shared<Joined>(state.first() ? bytes_of(block) : nullptr, own, width);
    state.within().all_gather_to(join, mine, own)->wait();
    if (state.first()) state.across().all_gather(whole, block, blocks)->wait();
    state.spread(whole, segments.total(), std::make_shared<Part>(out.data_ptr(), 0, segments.total() * width));
  });
}

std::unique_ptr<Pending> HostsChannel::all_gather_even(const at::Tensor& out, const at::Tensor& mine) {
  return HostsChannel::all_gather(out, mine, shard::Segments(size(), mine.numel()));
}

// Each rank sums an equal part of its host's gradients, the first one joins those parts, the hosts exchange sums, and
// everybody takes its segment of what came.
std::unique_ptr<Pending> HostsChannel::reduce_scatter(const at::Tensor& out, const at::Tensor& in,
                                                      const shard::Segments& segments) {
  if (segments.total() == 0) return std::make_unique<DonePending>();
  auto& state = *state_;
  return start(state_, "reduce_scatter", in, [&state, out, in, segments] {
    const auto& hosts = state.hosts;
    const int ranks = hosts.ranks(hosts.mine), here = state.origin.rank - hosts.first[hosts.mine];
    const int64_t width = out.element_size(), total = segments.total();
    std::vector<int64_t> lengths;
    for (int rank = 0; rank < ranks; ++rank) lengths.push_back(shard::rows_of_rank(total, ranks, rank).size());
    const shard::Segments parts(ranks, lengths);
    const auto part = state.shared_like(in, parts.length(here));
    state.within().reduce_scatter(part, in, parts)->wait();
    const auto sums = base::empty({state.first() ? total : 0}, in.options());
    const auto join = std::make_shared<Joined>(state.first() ? bytes_of(sums) : nullptr, parts, width);
    state.within().all_gather_to(join, part, parts)->wait();
    const auto blocks = state.by_host(segments);
    const auto block = state.shared_like(out, state.first() ? blocks.length(hosts.mine) : 0);
    if (state.first()) state.across().reduce_scatter(block, sums, blocks)->wait();
    const auto begin = (segments.begin(state.origin.rank) - blocks.begin(hosts.mine)) * width;
    state.spread(block, blocks.length(hosts.mine),
                 std::make_shared<Part>(out.data_ptr(), begin, static_cast<int64_t>(out.nbytes())));
  });
}

std::unique_ptr<Pending> HostsChannel::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  auto& state = *state_;
  return start(state_, "all_reduce", tensor, [&state, tensor, op] {
    state.within().all_reduce(tensor, op)->wait();
    if (state.first()) state.across().all_reduce(tensor, op)->wait();
    state.within().broadcast(tensor, 0)->wait();
  });
}

std::unique_ptr<Pending> HostsChannel::broadcast(const at::Tensor& tensor, int root) {
  auto& state = *state_;
  return start(state_, "broadcast", tensor, [&state, tensor, root] {
    const auto& hosts = state.hosts;
    const int host = hosts.of(root);
    if (hosts.mine == host) state.within().broadcast(tensor, root - hosts.first[host])->wait();
    if (state.first()) state.across().broadcast(tensor, host)->wait();
    if (hosts.mine != host) state.within().broadcast(tensor, 0)->wait();
  });
}

at::Tensor HostsChannel::buffer(int64_t nbytes, c10::Device device) {
  return state_->within_now()->buffer(nbytes, device);
}

}  // namespace fsdp::comm
