// What a Context does in a backward (docs/design/gradients.md).
#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/core/Tensor.h>
#include <fsdp/error.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "base/hash.h"
#include "engine/context.h"

namespace fsdp::engine {

/// Lives in the autograd graph task of a backward, as its final callback's capture: the task drops it run or not, so
/// that a backward that threw is noticed.
struct Context::BackwardToken {
  explicit BackwardToken(std::weak_ptr<Context> c) : context(std::move(c)) {}
  ~BackwardToken() {
    if (ended) return;
    if (auto alive = context.lock()) alive->abandon_backward();
  }
  std::weak_ptr<Context> context;
  bool ended = false;
};

void Context::ensure_backward(int task) {
  if (phase_ == Phase::kBackward) return;  // this one, or a task nested in it
  auto flags = no_flags();
  uint64_t salt = 3;
  for (auto* group : groups_) {
    if (!group) continue;
    group->update_membership();
    flags[place_of(GroupFlag::kUsed, *group)] = group->place.touched;
    flags[place_of(GroupFlag::kOpened, *group)] = std::exchange(group->place.opened, false);
    for (const auto& param : group->params()) base::mix(salt, param->wants_gradient());
    base::mix(salt, group->flags().sync_gradients);
  }
  flags = begin_phase(Phase::kBackward, Step::kBackward, salt, flags);
  for (const auto key : std::exchange(forwards_, {})) spare(key, flags);

  // Gradients are complete in the reverse of the order in which groups were first used: the one order of reductions.
  // Groups that are opened in place come in the order of the model: ranks do not tell each other what they open.
  for (auto* group : groups_) {
    if (group && group->in_place() && !std::exchange(group->place.ordered, true)) order_.push_back(group->place.id);
  }
  to_reduce_.clear();
  next_reduce_ = 0;
  bounded_ = !uneven_;
  for (auto id = order_.rbegin(); id != order_.rend(); ++id) {
    auto* group = group_at(*id);
    if (!group) continue;
    const bool touched = flags[place_of(GroupFlag::kUsed, *group)];
    if (touched != group->place.touched) bounded_ = false;
    if (touched && group->flags().sync_gradients && group->has_members()) to_reduce_.push_back(group);
  }
  // Where gradients were missing to the end last time (an output that the loss does not use), others must not wait.
  std::stable_partition(to_reduce_.begin(), to_reduce_.end(), [](const auto* group) { return !group->place.slow; });
  backward_since_forward_ = true;

  auto token = std::make_shared<BackwardToken>(weak_from_this());
  torch::autograd::Engine::get_default_engine().queue_callback([token] {
    token->ended = true;
    if (auto context = token->context.lock()) context->finish_backward();
  });
}

void Context::on_gradient(ShardedParam& param, const at::Tensor& gradient) {
  if (phase_ == Phase::kFailed) refuse_failed();
  auto& group = param.group();
  if (phase_ == Phase::kForward) {
    throw NotSupported("libfsdp: rank " + std::to_string(rank_) + ": a gradient of parameter '" + param.name() +
                       "' arrives while the forward of its model is still running; call backward() after the forward "
                       "returned (autograd::grad with respect to inputs is fine inside it)");
  }
  ensure_backward(torch::autograd::get_current_graph_task_id());
  auto unsharded = param.slot().run_gradient_hooks(gradient);
  if (!unsharded.defined()) return;
  if (unsharded.requires_grad()) {
    throw NotSupported("libfsdp: rank " + std::to_string(rank_) + ": the gradient of parameter '" + param.name() +
                       "' requires grad itself (backward(create_graph=true)); reducing it would cut it off. Use "
                       "autograd::grad with create_graph for the inner gradient, then backward() for the outer one");
  }
  at::NoGradGuard no_grad;
  group.store_gradient(param, std::move(unsharded));
  used_[static_cast<size_t>(group.place.first_param) + param.index()] = 1;
  if (group.place.issued) {
    group.place.late = true;
    return;
  }
  if (!group.complete()) return;
  if (group.flags().reshard_after_backward) {
    group.reshard();
    if (current_ == &group) current_ = nullptr;
  }
  issue_ready_reductions();
}

bool Context::ready_to_reduce(const ParamGroup& group) const {
  // A group that only other ranks use has nothing to wait for.
  return group.complete() || (!group.place.touched && !group.holds_gradients());
}

void Context::issue_ready_reductions() {
  while (next_reduce_ < to_reduce_.size() && ready_to_reduce(*to_reduce_[next_reduce_])) {
    limit_reductions(*to_reduce_[next_reduce_]);
    issue_reduce(*to_reduce_[next_reduce_++]);
  }
}

void Context::limit_reductions(ParamGroup& next) {
  // One reduction in flight (or as many as the user wants) beside the group whose gradients arrive. While it waits,
  // this rank issues no gathers and answers no questions: a rank that got no gradients for this group (it cut the group
  // off from its loss) and needs a gather first would wait forever. So only where all ranks do the same as far as is
  // known, and not for long.
  const auto allowed = static_cast<size_t>(next.flags().max_reductions);
  if (bounded_ && reducing_.size() >= allowed) {
    bounded_ = reducing_[reducing_.size() - allowed]->wait_inputs(patience_);
  }
}

void Context::issue_reduce(ParamGroup& group) {
  ++stats_.reduces;
  log("reduce-scatter", group, group.unsharded_bytes());
  std::exception_ptr failed;
  try {
    group.run_gradient_hook();
  } catch (...) {
    failed = std::current_exception();  // the other ranks count on this reduction
  }
  group.begin_reduce();
  group.place.issued = true;
  reducing_.push_back(&group);
  if (failed) std::rethrow_exception(failed);
}

void Context::finish_backward() {
  try {
    while (!schedule_.done()) issue_gather(schedule_.take(), false);
    for (auto& ahead : ahead_) ahead.group->reshard();
    ahead_.clear();

    auto flags = no_flags();
    for (auto* group : groups_) {
      if (!group) continue;
      flags[place_of(GroupFlag::kOpened, *group)] = std::exchange(group->place.opened, false);
      if (!group->flags().sync_gradients) continue;
      const auto first = static_cast<size_t>(group->place.first_param), n = group->params().size();
      std::copy_n(used_.begin() + static_cast<int64_t>(first), n, flags.begin() + static_cast<int64_t>(first));
      flags[place_of(GroupFlag::kUsed, *group)] = group->place.issued;
      flags[place_of(GroupFlag::kLate, *group)] = group->place.late;
      flags[place_of(GroupFlag::kSlow, *group)] = !ready_to_reduce(*group);
    }
    if (!meet({Step::kBackwardEnd}, flags)) throw InvariantError("libfsdp: tickets without keys differ");
    bounded_ = true;  // from here on all ranks issue the same
    spare(schedule_.key(), flags);
    for (auto* group : groups_) {
      if (group) group->place.slow = flags[place_of(GroupFlag::kSlow, *group)];
    }

    const auto anywhere = [&](const ParamGroup& group) {
      const auto* used = flags.data() + group.place.first_param;
      return flags[place_of(GroupFlag::kUsed, group)] ||
             std::any_of(used, used + group.params().size(), [](uint8_t flag) { return flag != 0; });
    };
    for (; next_reduce_ < to_reduce_.size(); ++next_reduce_) {
      if (anywhere(*to_reduce_[next_reduce_])) {
        limit_reductions(*to_reduce_[next_reduce_]);
        issue_reduce(*to_reduce_[next_reduce_]);
      }
    }
    // Gradients that no forward announced (a second backward over a kept graph), then those that came too late.
    for (auto id = order_.rbegin(); id != order_.rend(); ++id) {
      auto* group = group_at(*id);
      if (!group || group->place.issued || !group->flags().sync_gradients || !anywhere(*group)) continue;
      limit_reductions(*group);
      issue_reduce(*group);
    }
    for (auto* group : groups_) {
      if (group && flags[place_of(GroupFlag::kLate, *group)]) issue_reduce(*group);
    }
    for (auto* group : reducing_) group->finish_reduce(flags.data() + group->place.first_param);
    for (auto* group : reducing_) group->finish_offload();

    auto reduced = std::move(reducing_);
    reducing_.clear();
    may_be_old_ = !reduced.empty();
    to_reduce_.clear();
    next_reduce_ = 0;
    for (auto* group : groups_) {
      if (!group) continue;
      if (group->flags().reshard_after_backward) group->reshard();
      group->drop_discarded();
      group->drop_part();
      group->remember_arrivals();
      const bool handed_out = group->place.issued && group->flags().all_reduce_gradients;
      if (handed_out) {
        std::fill_n(used_.begin() + group->place.first_param, group->params().size(), uint8_t{0});
      }
      group->place.late = false;
      group->place.pinned = false;
    }
    open_.clear();
    current_ = nullptr;
    phase_ = Phase::kIdle;

    // Hooks last: they may step an optimizer, and see the model between iterations.
    in_hooks_ = true;
    for (auto* group : reduced) {
      if (!group->place.issued) continue;
      group->place.issued = false;
      if (!group->flags().all_reduce_gradients) continue;
      for (const auto& param : group->params()) {
        if (flags[static_cast<size_t>(group->place.first_param) + param->index()]) {
          param->slot().run_post_accumulate_hooks();
        }
      }
    }
    in_hooks_ = false;
  } catch (const std::exception& error) {
    in_hooks_ = false;
    if (phase_ == Phase::kBackward) mark_failed(error.what());
    throw;
  }
}

void Context::abandon_backward() noexcept {
  if (phase_ == Phase::kBackward) give_up("its backward threw");
}

}  // namespace fsdp::engine
