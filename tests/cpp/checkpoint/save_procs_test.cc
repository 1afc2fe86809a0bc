// Saving from several processes, some of which fail or are killed.
#include <signal.h>
#include <sys/resource.h>

#include <chrono>
#include <thread>

#include <gtest/gtest.h>

#include <fsdp/fsdp.h>

#include "net.h"
#include "support/processes.h"
#include "temp_folder.h"

namespace fsdp {
namespace {

using testing::message_of;
using testing::process_arguments;
using testing::TempFolder;

/// A model whose every value is `value`, large enough that a save takes a while.
torch::nn::Sequential filled(double value) {
  torch::nn::Sequential model(torch::nn::Linear(512, 512), torch::nn::Linear(512, 512));
  const torch::NoGradGuard no_grad;
  for (auto& p : model->parameters()) {
    p.fill_(value);
  }
  return model;
}

FSDP_PROCESS_BODY(save_until_killed) {
  init_process_group({.timeout = std::chrono::seconds(5)});
  const int victim = std::stoi(process_arguments()[1]);
  const auto delay = std::chrono::milliseconds(std::stoi(process_arguments()[2]));
  save(fully_shard(filled(0)), process_arguments()[0], {.step = 0});
  barrier();
  std::thread killer([&] {
    std::this_thread::sleep_for(delay);
    if (rank() == victim) {
      ::kill(::getpid(), SIGKILL);
    }
  });
  killer.detach();
  for (int64_t step = 1;; ++step) {
    save(fully_shard(filled(static_cast<double>(step))), process_arguments()[0], {.step = step});
  }
}

TEST(SaveProcsFault, AKilledRankLeavesAWholeCheckpoint) {
  int round = 0;
  for (const int delay : {3, 47, 101, 160}) {
    const TempFolder folder;
    const std::string victim = std::to_string(round++ % 2);
    testing::run_processes(2, "save_until_killed",
                           {.arguments = {folder / "ckpt", victim, std::to_string(delay)}, .expected_to_fail = {0, 1}});
    auto model = filled(-1);
    const auto info = load(model, folder / "ckpt");
    for (const auto& item : full_state_dict(model)) {
      EXPECT_TRUE(torch::equal(item.value(), torch::full_like(item.value(), static_cast<double>(info.step))))
          << item.key() << " of step " << info.step;
    }
    // The next save clears what was left.
    save(model, folder / "ckpt");
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
  }
}

FSDP_PROCESS_BODY(save_without_room_on_rank_1) {
  init_process_group({.timeout = std::chrono::seconds(20)});
  const auto& path = process_arguments()[0];
  auto model = fully_shard(filled(1));
  save(model, path, {.step = 1});
  if (rank() == 1) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{100'000, 100'000};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  }
  const auto message = message_of<CheckpointError>([&] { save(model, path, {.step = 2}); });
  EXPECT_NE(message.find("on rank 1: cannot write"), std::string::npos) << message;
  EXPECT_NE(message.find("File too large"), std::string::npos) << message;
  EXPECT_EQ(load(model, path).step, 1);
}

TEST(SaveProcsFault, AFullDiskOnOneRankIsSeenByAll) {
  const TempFolder folder;
  testing::run_processes(2, "save_without_room_on_rank_1", {.arguments = {folder / "ckpt"}});
}

FSDP_PROCESS_BODY(generators) {
  init_process_group();
  const auto& path = process_arguments()[0];
  torch::manual_seed(static_cast<uint64_t>(100 + rank()));
  auto model = fully_shard(filled(1));
  save(model, path);
  const auto expected = torch::rand({3});
  torch::manual_seed(7);
  load(model, path, {.rng = false});
  EXPECT_FALSE(torch::equal(torch::rand({3}), expected));
  load(model, path);
  EXPECT_TRUE(torch::equal(torch::rand({3}), expected)) << "rank " << rank() << " gets its own generator back";
}

TEST(SaveProcs, EachRankHasItsOwnGenerator) {
  const TempFolder folder;
  testing::run_processes(2, "generators", {.arguments = {folder / "ckpt"}});
}

}  // namespace
}  // namespace fsdp
