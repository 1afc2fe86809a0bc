#include "engine/schedule.h"

#include <set>

#include <gtest/gtest.h>

namespace fsdp::engine {
namespace {

constexpr uint64_t kForward = 1, kBackward = 2;

void record(Schedule& schedule, uint64_t key, const std::vector<int>& groups) {
  schedule.begin(key);
  ASSERT_FALSE(schedule.following());
  for (int group : groups) schedule.note(group);
}

std::vector<int> follow(Schedule& schedule, uint64_t key) {
  schedule.begin(key);
  std::vector<int> groups;
  while (const auto next = schedule.next()) {
    EXPECT_EQ(schedule.take(), *next);
    groups.push_back(*next);
  }
  return groups;
}

TEST(Schedule, RecordsTheFirstPhaseAndFollowsIt) {
  Schedule schedule;
  record(schedule, kForward, {0, 1, 2, 1});
  EXPECT_TRUE(schedule.done());
  EXPECT_FALSE(schedule.next());
  schedule.begin(kForward);
  EXPECT_TRUE(schedule.following());
  EXPECT_FALSE(schedule.done());
  EXPECT_EQ(follow(schedule, kForward), (std::vector<int>{0, 1, 2, 1}));
  EXPECT_TRUE(schedule.done());
}

TEST(Schedule, FindsOnlyWhatIsStillToCome) {
  Schedule schedule;
  record(schedule, kForward, {0, 1, 2, 1});
  schedule.begin(kForward);
  EXPECT_EQ(schedule.find(1), 1u);
  EXPECT_FALSE(schedule.find(7));
  EXPECT_EQ(schedule.take(), 0);
  EXPECT_EQ(schedule.take(), 1);
  EXPECT_FALSE(schedule.find(0));
  EXPECT_EQ(schedule.find(1), 3u);
  EXPECT_EQ(schedule.cursor(), 2u);
}

TEST(Schedule, FindsNothingWhileRecording) {
  Schedule schedule;
  record(schedule, kForward, {3});
  EXPECT_FALSE(schedule.find(3));
}

TEST(Schedule, KeepsOneRecordAKey) {
  Schedule schedule;
  record(schedule, kForward, {0, 1});
  record(schedule, kBackward, {1, 0});
  EXPECT_EQ(follow(schedule, kForward), (std::vector<int>{0, 1}));
  EXPECT_EQ(follow(schedule, kBackward), (std::vector<int>{1, 0}));
  EXPECT_EQ(follow(schedule, kForward), (std::vector<int>{0, 1}));
}

TEST(Schedule, AnUnforeseenGatherMakesTheRecordStale) {
  Schedule schedule;
  record(schedule, kForward, {0, 1});
  EXPECT_EQ(follow(schedule, kForward), (std::vector<int>{0, 1}));
  schedule.note(5);
  record(schedule, kForward, {0, 5, 1});  // anew
  EXPECT_EQ(follow(schedule, kForward), (std::vector<int>{0, 5, 1}));
}

TEST(Schedule, AGatherThatNobodyNeedsAnyMoreLeavesTheRecord) {
  Schedule schedule;
  record(schedule, kForward, {0, 1, 2, 1});
  const auto spare = [&](const std::set<int>& needed) {
    schedule.spare(kForward, [&](int group) { return needed.count(group) > 0; });
  };
  schedule.begin(kBackward);
  for (int i = 1; i < Schedule::kSpared; ++i) spare({0, 2});
  spare({0, 1});  // in a row is what counts
  for (int i = 1; i < Schedule::kSpared; ++i) spare({0, 2});
  EXPECT_EQ(follow(schedule, kForward), (std::vector<int>{0, 1, 2, 1}));
  spare({0, 2});
  EXPECT_EQ(follow(schedule, kForward), (std::vector<int>{0, 2}));
  schedule.spare(99, [](int) { return false; });  // of no record
  for (int i = 0; i < Schedule::kSpared; ++i) spare({});
  EXPECT_TRUE(follow(schedule, kForward).empty());
}

TEST(Schedule, APhaseThatFailedLeavesNoRecord) {
  Schedule schedule;
  record(schedule, kForward, {0});
  schedule.abandon();
  record(schedule, kForward, {0, 1});
  EXPECT_EQ(follow(schedule, kForward), (std::vector<int>{0, 1}));
  schedule.abandon();  // while following: the record may be why
  record(schedule, kForward, {1});
}

TEST(Schedule, APhaseWithoutGathersIsARecordToo) {
  Schedule schedule;
  record(schedule, kBackward, {});
  schedule.begin(kBackward);
  EXPECT_TRUE(schedule.following());
  EXPECT_TRUE(schedule.done());
}

}  // namespace
}  // namespace fsdp::engine
