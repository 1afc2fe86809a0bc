#include "engine/context.h"

#include <algorithm>
#include <functional>
#include <sstream>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <fsdp/error.h>
#include <torch/csrc/autograd/graph_task.h>

#include "base/hash.h"
#include "mesh/mesh_state.h"
#include "mesh/world.h"

namespace fsdp::engine {

using base::mix;

namespace {

int graph_task() { return torch::autograd::get_current_graph_task_id(); }

constexpr std::chrono::milliseconds kLeastPatience(100);

}  // namespace

const char* name_of(Phase phase) {
  return phase == Phase::kForward ? "forward" : phase == Phase::kBackward ? "backward" : "between";
}

std::shared_ptr<Context> Context::create(const std::vector<ParamGroup*>& groups, const DeviceMesh& mesh) {
  auto context = std::make_shared<Context>(mesh);
  auto& self = *context;
  self.rank_ = mesh.state()->world()->rank();
  self.patience_ = std::max<std::chrono::milliseconds>(mesh.state()->world()->timeout() / 60, kLeastPatience);
  for (auto* group : groups) {
    if (group->context_) {
      auto& old = *group->context_;
      if (old.phase_ != Phase::kIdle) {
        throw InvalidArgument("libfsdp: group '" + group->name() +
                              "' is in the middle of a forward or backward; shard the enclosing module before the "
                              "first step, or call reset_iter_state() first");
      }
      for (auto*& place : old.groups_) {
        if (place == group) place = nullptr;
      }
    }
    group->drop_discarded();
    group->reshard();
    group->drop_part();
    group->context_ = context;
    group->streams_ = self.streams_on(group->device_);
    auto& place = group->place;
    auto *parent = place.parent, *leader = place.leader;
    place = ParamGroup::Place{};
    place.parent = parent;
    place.leader = leader;
    place.id = static_cast<int>(self.groups_.size());
    place.first_param = static_cast<int>(self.param_count_);
    self.param_count_ += group->params().size();
    self.groups_.push_back(group);
  }
  self.used_.assign(self.param_count_, 0);
  self.agreement_ =
      std::make_unique<Agreement>(mesh.state()->flat_channel(mesh::Lane::kGather), self.no_flags().size());
  self.note_config_change();
  return context;
}

std::shared_ptr<Streams> Context::streams_on(c10::Device device) {
  for (const auto& streams : streams_) {
    if (streams->device == device) return streams;
  }
  return streams_.emplace_back(std::make_shared<Streams>(device));
}

void Context::set_optimizer_event(std::shared_ptr<const c10::Event> event) {
  for (const auto& streams : streams_) streams->set_optimizer_event(event);
}

void Context::remove(ParamGroup& group) {
  for (auto*& place : groups_) {
    if (place == &group) place = nullptr;
  }
  if (phase_ != Phase::kFailed) {
    phase_ = Phase::kFailed;
    failure_ = "part of the model (group '" + group.name() + "') was destroyed";
  }
  open_.clear();
  ahead_.clear();
  to_reduce_.clear();
  reducing_.clear();
  current_ = nullptr;
}

void Context::log(const char* act, const ParamGroup& group, int64_t bytes) {
  events_.push_back({phase_, act, group.name(), bytes});
}

void Context::count_all_reduce(const ParamGroup& group) {
  ++stats_.all_reduces;
  log("all-reduce", group, 0);
}

double Context::pre_divide_factor(const ParamGroup& group) const {
  const double whole =
      group.flags_.divide_factor > 0 ? group.flags_.divide_factor : static_cast<double>(group.world_ * group.replicas_);
  double factor = 1;
  while (factor * factor < whole) factor *= 2;
  return factor;
}

void Context::note_config_change() {
  // A hash and not a count: ranks may set the same thing a different number of times.
  config_ = 0;
  const auto mix_list = [this](bool given, const std::vector<ParamGroup*>& list) {
    mix(config_, given);
    for (const auto* group : list) mix(config_, static_cast<uint64_t>(group->place.id) + 2);
  };
  for (auto* group : groups_) {
    if (!group) continue;
    const auto& flags = group->flags();
    const auto& place = group->place;
    mix(config_, flags.reshard_after_forward + 2 * flags.reshard_after_backward + 4 * flags.all_reduce_gradients);
    mix(config_, std::hash<double>()(flags.divide_factor));
    mix(config_, static_cast<uint64_t>(group->kept_over()));
    mix(config_, static_cast<uint64_t>(group->customs()));
    mix(config_, group->in_place());
    for (const auto& dtype : {group->policy().param_dtype, group->policy().reduce_dtype}) {
      mix(config_, dtype ? static_cast<uint64_t>(*dtype) + 1 : 0);
    }
    mix_list(place.explicit_forward_prefetch, place.forward_prefetch);
    mix_list(place.explicit_backward_prefetch, place.backward_prefetch);
  }
}

// --- phases ---------------------------------------------------------------------------------------------------------

uint64_t Context::state_key(uint64_t salt) const {
  uint64_t key = 1;
  mix(key, salt);
  mix(key, config_);
  for (const auto* group : groups_) {
    if (!group) continue;
    // What is opened in place is nobody's business: opening it is no collective.
    if (group->state() != GatherState::kSharded && !group->opened())
      mix(key, static_cast<uint64_t>(group->place.id) + 2);
    if (group->holds_part()) mix(key, ~static_cast<uint64_t>(group->place.id));
  }
  return key;
}

std::vector<uint8_t> Context::begin_phase(Phase phase, Step step, uint64_t salt, const std::vector<uint8_t>& flags) {
  if (phase_ == Phase::kFailed) refuse_failed();
  if (phase_ != Phase::kIdle) {
    throw InvariantError("libfsdp: rank " + std::to_string(rank_) +
                         " begins a forward or backward while another one of the same model is under way");
  }
  for (auto* group : groups_) {
    if (!group) continue;
    group->drop_discarded();
    if (group->state() != GatherState::kSharded && group->stale()) group->reshard();
    if (group->holds_part() && (phase != Phase::kBackward || group->stale())) group->drop_part();
    group->publish();
  }
  ahead_.clear();
  open_.clear();
  current_ = nullptr;
  auto joined = flags;
  if (!meet({step, 0, state_key(salt)}, joined)) {
    // A group that only some ranks used stays whole on those only. All see it, and all start over from shards.
    for (auto* group : groups_) {
      if (!group) continue;
      group->reshard();
      group->drop_part();
    }
    joined = flags;
    if (!meet({step, 0, state_key(salt)}, joined)) {
      const std::string what =
          "libfsdp: ranks begin a step with different settings: which parameters require gradients, gradient sync, "
          "reshard flags, divide factors and prefetch lists must be the same on every rank (found on rank " +
          std::to_string(rank_) + ")";
      mark_failed(what);
      throw CommError(what);
    }
  }
  schedule_.begin(state_key(salt));
  if (phase == Phase::kForward && std::find(forwards_.begin(), forwards_.end(), schedule_.key()) == forwards_.end()) {
    forwards_.push_back(schedule_.key());
  }
  for (auto* group : groups_) {
    if (group) group->use_part(group->holds_part());
  }
  phase_ = phase;
  return joined;
}

bool Context::meet(const Ticket& ticket, std::vector<uint8_t>& flags) {
  const auto mine = flags;
  while (true) {
    ++stats_.agreements;
    Agreement::Outcome outcome;
    try {
      outcome = agreement_->exchange(ticket, flags);
    } catch (const CommError& error) {
      mark_failed(error.what());
      throw;
    }
    if (outcome.failed) report(outcome, ticket);
    if (outcome.equal) {
      if (ticket.step == Step::kGather) {
        if (ticket.key == 0) schedule_.note(static_cast<int>(ticket.group));
        issue_gather(static_cast<int>(ticket.group), true);
      }
      return true;
    }
    // Ranks went different ways. Whoever needs a gather gets it, lowest rank first: the others take part and ask again.
    const auto wish = std::find_if(outcome.tickets.begin(), outcome.tickets.end(),
                                   [](const Ticket& t) { return t.step == Step::kGather; });
    if (wish == outcome.tickets.end()) {
      const bool same_step = std::all_of(outcome.tickets.begin(), outcome.tickets.end(),
                                         [&](const Ticket& t) { return t.step == ticket.step; });
      if (same_step) return false;
      report(outcome, ticket);
    }
    uneven_ = true;
    if (wish->key == 0) schedule_.note(static_cast<int>(wish->group));
    const bool wanted = ticket.step == Step::kGather && ticket.group == wish->group;
    if (wanted) {
      issue_gather(static_cast<int>(wish->group), true);
      return true;
    }
    join_gather(static_cast<int>(wish->group));
    flags = mine;
  }
}

std::string Context::describe(const Ticket& ticket) const {
  switch (ticket.step) {
    case Step::kForward:
      return "begins a forward";
    case Step::kForwardNoGrad:
      return "begins a forward under no_grad";
    case Step::kForwardEnd:
      return "ends a forward";
    case Step::kBackward:
      return "begins a backward";
    case Step::kBackwardEnd:
      return "ends a backward";
    case Step::kGather: {
      const auto* group = ticket.group < groups_.size() ? groups_[ticket.group] : nullptr;
      return "needs the parameters of group '" + (group ? group->name() : std::string("?")) + "'";
    }
  }
  return "?";
}

void Context::report(const Agreement::Outcome& outcome, const Ticket& mine) {
  std::ostringstream out;
  out << "libfsdp: rank " << rank_ << " " << describe(mine) << ", but ";
  bool first = true;
  for (size_t r = 0; r < outcome.tickets.size(); ++r) {
    if (!outcome.messages[r].empty()) {
      out << (first ? "" : "; ") << "rank " << r << " gave up: " << outcome.messages[r];
      first = false;
    } else if (!outcome.failed && outcome.tickets[r].step != mine.step) {
      out << (first ? "" : "; ") << "rank " << r << " " << describe(outcome.tickets[r]);
      first = false;
    }
  }
  out << ". Every rank must run the same steps; after handling the error, call reset_iter_state() on every rank.";
  drain();
  mark_failed(out.str());
  throw CommError(failure_);
}

void Context::refuse_failed() const {
  throw CommError("libfsdp: rank " + std::to_string(rank_) + ": an earlier forward or backward of this model failed (" +
                  failure_ + "); call reset_iter_state() on the root, on every rank, before the next step");
}

void Context::drain() noexcept {
  try {
    while (schedule_.next()) {
      try {
        issue_gather(schedule_.take(), false);
      } catch (const CommError&) {
        throw;
      } catch (const std::exception&) {
        // An extension threw. The gather was issued all the same.
      }
    }
    if (phase_ == Phase::kBackward) {
      while (next_reduce_ < to_reduce_.size()) issue_reduce(*to_reduce_[next_reduce_++]);
    }
  } catch (const std::exception&) {
    // The wire is broken too: nobody can be helped, and the first error is the one to show.
  }
}

void Context::give_up(const std::string& what) noexcept {
  drain();
  try {
    agreement_->post_failure(what);
  } catch (const std::exception&) {
  }
  mark_failed(what);
}

void Context::mark_failed(const std::string& what) {
  phase_ = Phase::kFailed;
  failure_ = what;
  schedule_.abandon();
}

void Context::reset() {
  if (phase_ != Phase::kFailed) give_up("reset_iter_state() was called");
  agreement_->settle();
  for (auto* group : groups_) {
    if (!group) continue;
    group->drop_discarded();
    group->reshard();
    group->drop_part();
    group->drop_discarded();
    group->drop_gradients();
    auto& place = group->place;
    group->forget_touches();
    place.opened = place.issued = place.late = place.slow = place.pinned = false;
  }
  std::fill(used_.begin(), used_.end(), 0);
  open_.clear();
  ahead_.clear();
  to_reduce_.clear();
  reducing_.clear();
  forwards_.clear();
  next_reduce_ = 0;
  current_ = nullptr;
  forward_depth_ = 0;
  backward_since_forward_ = true;
  schedule_.abandon();
  phase_ = Phase::kIdle;
}

// --- gathers --------------------------------------------------------------------------------------------------------

void Context::note_gather(int id) {
  auto& group = *group_at(id);
  ++stats_.gathers;
  log("all-gather", group, group.unsharded_bytes());
  if (!std::exchange(group.place.ordered, true)) order_.push_back(id);
}

void Context::join_gather(int id) {
  note_gather(id);
  group_at(id)->join_gather();
}

void Context::issue_gather(int id, bool wanted) {
  note_gather(id);
  auto& group = *group_at(id);
  if (group.state() == GatherState::kSharded) {
    group.begin_gather();
    ahead_.push_back({&group, wanted});
  } else {
    group.join_gather();  // whole here already; the others count on this rank
  }
}

void Context::advance_to(size_t position) {
  while (!schedule_.done() && schedule_.cursor() <= position) issue_gather(schedule_.take(), false);
}

void Context::fetch(ParamGroup& group) {
  if (group.in_place()) {
    log("open in place", group, 0);
    group.open();
    return;
  }
  if (const auto position = schedule_.find(group.place.id)) {
    advance_to(*position);
    return;
  }
  // Not foreseen: first everything that the others expect, then ask.
  while (!schedule_.done()) issue_gather(schedule_.take(), false);
  auto flags = no_flags();
  meet({Step::kGather, static_cast<uint32_t>(group.place.id), 0}, flags);
}

void Context::consume(ParamGroup& group) {
  const auto found =
      std::find_if(ahead_.begin(), ahead_.end(), [&](const Ahead& ahead) { return ahead.group == &group; });
  if (found == ahead_.end()) return;
  // What was passed on the way is not used by this rank.
  std::deque<Ahead> rest;
  for (auto at = ahead_.begin(); at != ahead_.end(); ++at) {
    if (at == found) continue;
    if (at < found && !at->wanted) {
      at->group->reshard();
    } else {
      rest.push_back(*at);
    }
  }
  ahead_ = std::move(rest);
}

void Context::prefetch_after(ParamGroup& group) {
  const bool backward = phase_ == Phase::kBackward;
  auto& place = group.place;
  if (backward ? place.explicit_backward_prefetch : place.explicit_forward_prefetch) {
    for (auto* next : backward ? place.backward_prefetch : place.forward_prefetch) {
      if (next->state() != GatherState::kSharded) continue;
      fetch(*next);
      next->place.opened = true;  // the user wants it
      for (auto& ahead : ahead_) ahead.wanted = ahead.wanted || ahead.group == next;
    }
    return;
  }
  if (!ahead_.empty()) return;
  const auto next = schedule_.next();
  if (next && group_at(*next)->state() == GatherState::kSharded) issue_gather(schedule_.take(), false);
}

void Context::open(ParamGroup& group) {
  while (!open_.empty() && !group.is_inside(*open_.back())) {
    close(*open_.back());
    open_.pop_back();
  }
  if (std::find(open_.begin(), open_.end(), &group) == open_.end()) open_.push_back(&group);
}

void Context::close(ParamGroup& group) {
  const auto& flags = group.flags();
  // Operators that read what an extension made of a parameter are not seen: nothing would gather the group again.
  if (phase_ == Phase::kBackward && group.extended() && !group.complete()) return;
  if (phase_ == Phase::kBackward ? flags.reshard_after_backward : flags.reshard_after_forward) {
    if (phase_ == Phase::kForward && forward_records_) group.keep_part();
    group.reshard();
  }
  if (current_ == &group) current_ = nullptr;
}

bool Context::whole_here() const { return forward_depth_ > 0 || (!in_hooks_ && graph_task() >= 0); }

void Context::touch(ShardedParam& param) {
  auto& group = param.group();
  const int task = graph_task();
  if (phase_ == Phase::kForward && forward_records_) param.touched_ = group.place.touched = true;
  if (&group == current_ && task == current_task_ && group.state() == GatherState::kUnsharded) return;
  touch_slow(group, task);
}

void Context::need(ParamGroup& group) { touch_slow(group, graph_task()); }

void Context::touch_slow(ParamGroup& group, int task) {
  if (phase_ == Phase::kFailed) refuse_failed();
  try {
    if (task >= 0 && phase_ != Phase::kForward) ensure_backward(task);
    open(group);
    group.place.opened = true;
    if (group.state() != GatherState::kUnsharded) {
      if (group.state() == GatherState::kSharded) fetch(group);
      if (group.state() == GatherState::kGathering) {
        consume(group);
        group.finish_gather();
      }
      current_ = &group;
      current_task_ = task;
      prefetch_after(group);
      return;
    }
    current_ = &group;
    current_task_ = task;
  } catch (const CommError& error) {
    if (phase_ != Phase::kFailed) mark_failed(error.what());
    throw;
  }
}

// --- forward --------------------------------------------------------------------------------------------------------

void Context::enter_forward(ParamGroup& group) {
  if (forward_depth_ == 0 && graph_task() < 0) {
    forward_records_ = at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
    if (phase_ == Phase::kIdle) {
      const bool accumulating = forward_records_ && !backward_since_forward_;
      if (!accumulating) events_.clear();
      if (forward_records_ && backward_since_forward_) {
        for (auto* g : groups_) {
          if (g) g->forget_touches();
        }
        backward_since_forward_ = false;
      }
    }
    // Handles that are called one after the other each have an order of their own.
    uint64_t salt = forward_records_ ? 1 : 2;
    mix(salt, static_cast<uint64_t>(group.place.id));
    begin_phase(Phase::kForward, forward_records_ ? Step::kForward : Step::kForwardNoGrad, salt, no_flags());
  } else if (phase_ == Phase::kFailed) {
    refuse_failed();
  }
  ++forward_depth_;
}

void Context::free_what_may_be_old() {
  if (phase_ != Phase::kIdle || !may_be_old_) return;
  for (auto* group : groups_) {
    if (group && !group->place.pinned) group->reshard();
  }
}

void Context::leave_forward(ParamGroup& group) {
  --forward_depth_;
  if (phase_ != Phase::kForward) return;  // recomputed inside a backward, which closes its groups itself
  if (forward_depth_ > 0) {
    while (!open_.empty() && open_.back()->is_inside(group)) {
      close(*open_.back());
      open_.pop_back();
    }
    return;
  }
  while (!schedule_.done()) issue_gather(schedule_.take(), false);
  for (auto& ahead : ahead_) ahead.group->reshard();
  ahead_.clear();
  for (auto* g : open_) close(*g);
  open_.clear();
  current_ = nullptr;
  // A rank that needs fewer groups than another one is here first. It may not leave: what the user does next (reduce
  // a loss over the ranks, say) would keep it from the gathers that the others still ask for.
  // And where parameters lie in memory that the ranks have in common, the others still read what this one may write.
  const bool shared = std::any_of(groups_.begin(), groups_.end(), [](auto* g) { return g && g->in_place(); });
  if (!schedule_.following() || uneven_ || shared) {
    auto flags = no_flags();
    meet({Step::kForwardEnd}, flags);
  }
  // The user may write to the shards next; other ranks may still read them.
  for (auto* g : groups_) {
    if (!g) continue;
    g->drop_discarded();
    if (!forward_records_) g->wait_for_reads();
  }
  may_be_old_ = !forward_records_;
  set_optimizer_event(nullptr);
  phase_ = Phase::kIdle;
}

void Context::fail_forward(ParamGroup& group, const std::string& what) {
  forward_depth_ = std::max(0, forward_depth_ - 1);
  if (forward_depth_ == 0 && phase_ == Phase::kForward) {
    give_up("its forward threw" + (current_ ? " in group '" + current_->name() + "'" : "") + ": " + what);
  }
}

// --- by hand --------------------------------------------------------------------------------------------------------

void Context::unshard(ParamGroup& group, bool wait) {
  if (phase_ == Phase::kFailed) refuse_failed();
  if (phase_ == Phase::kIdle) {
    group.drop_discarded();
    // What lies in place may be written by other ranks from now on: a copy is made.
    if (group.state() != GatherState::kSharded && (group.opened() || group.stale())) group.reshard();
    if (group.state() == GatherState::kSharded) {
      auto flags = no_flags();
      meet({Step::kGather, static_cast<uint32_t>(group.place.id), 1}, flags);
      ahead_.clear();
    }
    group.place.pinned = true;
  } else if (group.state() == GatherState::kSharded) {
    fetch(group);
    group.place.opened = true;
    for (auto& ahead : ahead_) ahead.wanted = ahead.wanted || ahead.group == &group;
  }
  if (wait && group.state() == GatherState::kGathering) {
    consume(group);
    group.finish_gather();
    if (phase_ == Phase::kIdle) group.wait_for_reads();
  }
}

void Context::reshard(ParamGroup& group) {
  group.reshard();
  group.drop_part();
  group.place.pinned = false;
  if (current_ == &group) current_ = nullptr;
}

}  // namespace fsdp::engine
