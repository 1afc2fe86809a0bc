#include "engine/schedule.h"

#include <algorithm>
#include <unordered_set>

namespace fsdp::engine {

void Schedule::finish() {
  if (!any_) return;
  if (stale_) {
    plans_.erase(key_);
  } else if (!following_) {
    plans_[key_] = {plan_, {}};
  }
}

void Schedule::begin(uint64_t key) {
  finish();
  any_ = true;
  key_ = key;
  cursor_ = 0;
  stale_ = false;
  const auto found = plans_.find(key);
  following_ = found != plans_.end();
  plan_ = following_ ? found->second.groups : std::vector<int>();
}

void Schedule::spare(uint64_t key, const std::function<bool(int group)>& needed) {
  const auto found = plans_.find(key);
  if (found == plans_.end()) return;
  auto& [groups, spared] = found->second;
  std::unordered_set<int> idle;
  for (int group : groups) {
    if (needed(group)) {
      spared.erase(group);
    } else {
      idle.insert(group);
    }
  }
  for (int group : idle) {
    if (++spared[group] >= kSpared) groups.erase(std::remove(groups.begin(), groups.end(), group), groups.end());
  }
}

std::optional<size_t> Schedule::find(int group) const {
  if (!following_) return std::nullopt;
  const auto found = std::find(plan_.begin() + static_cast<int64_t>(cursor_), plan_.end(), group);
  if (found == plan_.end()) return std::nullopt;
  return static_cast<size_t>(found - plan_.begin());
}

std::optional<int> Schedule::next() const {
  if (done()) return std::nullopt;
  return plan_[cursor_];
}

void Schedule::note(int group) {
  if (following_) {
    stale_ = true;
  } else {
    plan_.push_back(group);
  }
}

}  // namespace fsdp::engine
