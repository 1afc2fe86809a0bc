#pragma once
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/buffer_pool.h"
#include "engine/agreement.h"
#include "engine/param_group.h"
#include "engine/schedule.h"
#include "engine/stats.h"

namespace fsdp::engine {

enum class Phase {
  kIdle,
  kForward,
  kBackward,
  kFailed,  // until reset()
};

/// "forward", "backward" or "between": the phase of an event.
const char* name_of(Phase phase);

/// One line of an iteration's schedule.
struct Event {
  Phase phase;
  const char* act;
  std::string group;
  int64_t bytes;
};

/// All groups of one model on one rank, and when they communicate.
///
/// A touch (an operator that reads a group's parameters, reported by the tensor room) opens the group: it is gathered
/// if it has to be, and groups that the touched one is not inside of are closed. Nothing else starts a gather. Within
/// an iteration all ranks issue the same collectives in the same order; docs/design/schedule.md says how.
class Context : public std::enable_shared_from_this<Context> {
 public:
  /// Takes over `groups` (in module order, parents set), from earlier contexts too. Collective: all ranks call it
  /// alike.
  static std::shared_ptr<Context> create(const std::vector<ParamGroup*>& groups, const DeviceMesh& mesh);
  explicit Context(const DeviceMesh& mesh) : mesh_(mesh) {}

  Stats& stats() { return stats_; }
  /// What whole parameters of the CPU lie in.
  const base::BufferPool& leaf_memory() const { return leaf_memory_; }
  const std::vector<ParamGroup*>& groups() const { return groups_; }
  const std::vector<Event>& events() const { return events_; }
  const DeviceMesh& mesh() const { return mesh_; }
  Phase phase() const { return phase_; }
  int rank() const { return rank_; }

  // --- forward ----------------------------------------------------------------------------------------------------
  /// A forward begins / returned / threw, of the module whose group is `group`.
  void enter_forward(ParamGroup& group);
  /// Ahead of a forward, from a face that does not see every write to shards (on torch's DTensors operators on lists
  /// and fused ones leave no trace): frees what is whole since before the user had reason to write. That is after a
  /// forward without gradients, and after a backward that handed gradients out; not within an accumulation.
  void free_what_may_be_old();
  void leave_forward(ParamGroup& group);
  void fail_forward(ParamGroup& group, const std::string& what);

  /// Whether a parameter means the whole here: inside a forward, or in a graph task of autograd.
  bool whole_here() const;
  /// An operator reads `param`; returns with the leaves of its group whole.
  void touch(ShardedParam& param);
  /// The same ahead of any operator, for a face that knows where a module's forward begins. No parameter counts as
  /// used.
  void need(ParamGroup& group);

  // --- backward ---------------------------------------------------------------------------------------------------
  void on_gradient(ShardedParam& param, const at::Tensor& gradient);
  double pre_divide_factor(const ParamGroup& group) const;

  // --- by hand ----------------------------------------------------------------------------------------------------
  void unshard(ParamGroup& group, bool wait);
  void reshard(ParamGroup& group);
  /// The user changed something that the order of gathers depends on.
  void note_config_change();
  /// Ends what is in flight and forgets the iteration. Collective.
  void reset();

  /// See Streams::set_optimizer_event(); until the end of a forward.
  void set_optimizer_event(std::shared_ptr<const c10::Event> event);

  void remove(ParamGroup& group);
  void count_all_reduce(const ParamGroup& group);

 private:
  struct BackwardToken;
  friend struct BackwardToken;

  void touch_slow(ParamGroup& group, int task);
  void ensure_backward(int task);
  void finish_backward();
  void abandon_backward() noexcept;

  /// All ranks begin `phase` together; returns the union of the flags.
  std::vector<uint8_t> begin_phase(Phase phase, Step step, uint64_t salt, const std::vector<uint8_t>& flags);
  /// Meets the other ranks with this ticket, serving their gathers until all hold it. False: all are at the same step
  /// but their keys differ.
  bool meet(const Ticket& ticket, std::vector<uint8_t>& flags);
  void fetch(ParamGroup& group);
  void issue_gather(int group, bool wanted);
  /// Takes part in a gather for the other ranks only.
  void join_gather(int group);
  void note_gather(int group);
  void advance_to(size_t position);
  void prefetch_after(ParamGroup& group);
  void consume(ParamGroup& group);
  void open(ParamGroup& group);
  void close(ParamGroup& group);
  void issue_reduce(ParamGroup& group);
  void issue_ready_reductions();
  bool ready_to_reduce(const ParamGroup& group) const;
  void limit_reductions(ParamGroup& next);
  /// Issues everything that the other ranks count on, so that giving up here cannot leave them waiting.
  void drain() noexcept;
  void give_up(const std::string& what) noexcept;
  void mark_failed(const std::string& what);
  [[noreturn]] void refuse_failed() const;
  [[noreturn]] void report(const Agreement::Outcome& outcome, const Ticket& mine);
  std::string describe(const Ticket& ticket) const;
  uint64_t state_key(uint64_t salt) const;
  ParamGroup* group_at(int id) const { return groups_[static_cast<size_t>(id)]; }
  void log(const char* act, const ParamGroup& group, int64_t bytes);
  /// Flags of an exchange: one for each parameter (a gradient came), then one of each of these for each group.
  enum class GroupFlag { kUsed, kLate, kSlow, kOpened, kCount };  // kUsed: touched in forward, issued in backward
  size_t place_of(GroupFlag flag, const ParamGroup& group) const {
    return param_count_ + static_cast<size_t>(flag) * groups_.size() + static_cast<size_t>(group.place.id);
  }
  std::vector<uint8_t> no_flags() const {
    return std::vector<uint8_t>(param_count_ + static_cast<size_t>(GroupFlag::kCount) * groups_.size(), 0);
  }
  /// Schedule::spare for the gathers of groups that no rank opened, as `flags` say.
  void spare(uint64_t key, const std::vector<uint8_t>& flags) {
    schedule_.spare(key, [&](int id) {
      const auto* group = group_at(id);
      return group && flags[place_of(GroupFlag::kOpened, *group)];
    });
  }

  std::shared_ptr<Streams> streams_on(c10::Device device);

  DeviceMesh mesh_;
  int rank_ = 0;
  std::vector<ParamGroup*> groups_;                // by id
  std::vector<std::shared_ptr<Streams>> streams_;  // one a device
  std::unique_ptr<Agreement> agreement_;
  size_t param_count_ = 0;
  Schedule schedule_;
  Stats stats_;
  const base::BufferPool leaf_memory_;

  Phase phase_ = Phase::kIdle;
  std::string failure_;
  std::vector<uint8_t> used_;  // by parameter: a gradient came that no reduction has handed out yet
  int forward_depth_ = 0;
  bool uneven_ = false;  // ranks have been seen to need different groups
  bool in_hooks_ = false;
  bool backward_since_forward_ = false;
  bool forward_records_ = false;  // the forward under way records gradients
  bool may_be_old_ = false;       // see free_what_may_be_old()
  uint64_t config_ = 0;           // stands for the settings that must be the same on all ranks

  // The open groups, outermost first, and the last touch (the fast path's test).
  std::vector<ParamGroup*> open_;
  ParamGroup* current_ = nullptr;
  int current_task_ = -1;

  struct Ahead {
    ParamGroup* group;
    bool wanted;  // somebody asked for it by name; not just passed on the way
  };
  std::deque<Ahead> ahead_;             // issued, not yet touched
  std::vector<uint64_t> forwards_;      // keys of the schedules of those since the last backward began
  std::vector<int> order_;              // groups by their first gather ever: the same on all ranks
  std::vector<ParamGroup*> to_reduce_;  // still to be issued in this backward, in the agreed order
  size_t next_reduce_ = 0;
  bool bounded_ = true;                    // this backward waits for a reduction before it issues the next
  std::chrono::milliseconds patience_{0};  // how long it waits for one that other ranks may not have issued
  std::vector<ParamGroup*> reducing_;      // issued, in order, not finished
  std::weak_ptr<BackwardToken> backward_;

  std::vector<Event> events_;
};

}  // namespace fsdp::engine
