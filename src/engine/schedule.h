#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace fsdp::engine {

/// The order in which a phase (a forward, a backward) gathers its groups, recorded the first time and followed after.
///
/// Recording: every gather is agreed upon by all ranks before it is issued, so the record is the same everywhere.
/// Following: a rank issues the recorded gathers in their order, whatever it touches itself; a rank that skips a
/// group takes part all the same. A gather that the record does not have is agreed upon again, and makes the record
/// stale: the next phase of this key records anew. One that no rank needs any more is dropped from it after a while.
class Schedule {
 public:
  /// Begins a phase; `key` is equal on all ranks and stands for everything that the order may depend on.
  void begin(uint64_t key);
  uint64_t key() const { return key_; }
  /// In the last phase of `key` some rank needed the groups for which `needed` is true. A group that was not needed
  /// kSpared times in a row leaves the record. Called with the same on every rank.
  void spare(uint64_t key, const std::function<bool(int group)>& needed);
  static constexpr int kSpared = 4;
  bool following() const { return following_; }
  /// Groups still to be issued in this phase: the position of `group`'s next gather, or nothing.
  std::optional<size_t> find(int group) const;
  std::optional<int> next() const;
  int take() { return plan_[cursor_++]; }
  size_t cursor() const { return cursor_; }
  bool done() const { return !following_ || cursor_ >= plan_.size(); }
  /// A gather that was agreed upon rather than foreseen. May come after the phase ended on this rank.
  void note(int group);
  /// The phase failed: what it recorded is worth nothing.
  void abandon() { stale_ = true; }

 private:
  void finish();  // keeps or drops the record of the phase that ended
  struct Plan {
    std::vector<int> groups;
    std::unordered_map<int, int> spared;  // how often in a row nobody needed a group
  };
  std::unordered_map<uint64_t, Plan> plans_;
  std::vector<int> plan_;  // being recorded or followed
  uint64_t key_ = 0;
  size_t cursor_ = 0;
  bool following_ = false, stale_ = false, any_ = false;
};

}  // namespace fsdp::engine
