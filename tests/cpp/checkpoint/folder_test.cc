// A checkpoint's folder: what is replaced, what is refused, and what a kill leaves.
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include <fsdp/error.h>

#include "checkpoint/crc32.h"
#include "checkpoint/file.h"
#include "checkpoint/folder.h"
#include "checkpoint/index.h"
#include "checkpoint/safetensors.h"
#include "temp_folder.h"

namespace fsdp::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::message_of;
using testing::spill;
using testing::TempFolder;

// A checkpoint of two ranks whose every byte says which step it is.
void save_step(const std::string& path, int64_t step, bool exchange) {
  Staging staging(path);
  Index index;
  index.step = step;
  IndexTensor& tensor = index.tensors["model.w"] = {DType::kI64, {8}, {}};
  const std::vector<int64_t> values(4, step);
  for (int64_t rank = 0; rank < 2; ++rank) {
    const auto layout = lay_out({{"model.w", DType::kI64, {4}}}, {});
    File file = File::create(staging.folder() + "/" + rank_file(rank, 2));
    file.append(layout.bytes.data(), layout.bytes.size());
    file.append(values.data(), 32);
    file.finish();
    index.files.push_back({file.size(), layout.header.crc32});
    tensor.pieces.push_back({rank, rank * 4, rank * 4 + 4, crc32(values.data(), 32)});
  }
  staging.publish(write_index(index), exchange);
}

// The step of the checkpoint at `path`, after a look at every byte of it.
int64_t step_at(const std::string& path) {
  const std::string folder = find(path);
  const Index index = parse_index(testing::slurp(folder + "/" + kIndexFile), kIndexFile);
  for (const auto& piece : index.tensors.at("model.w").pieces) {
    const File file = File::open(folder + "/" + rank_file(piece.rank, index.world_size()));
    const Header header = read_header(file);
    EXPECT_EQ(header.crc32, index.files[piece.rank].header_crc32);
    std::vector<int64_t> values(4);
    file.read_at(header.data_begin, values.data(), 32);
    EXPECT_EQ(values, std::vector<int64_t>(4, index.step));
    EXPECT_EQ(crc32(values.data(), 32), piece.crc32);
  }
  return index.step;
}

size_t entries(const std::string& folder) {
  return static_cast<size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

TEST(Staging, ReplacesAndLeavesNothingBehind) {
  for (const bool exchange : {true, false}) {
    const TempFolder folder;
    for (int64_t step = 1; step <= 3; ++step) {
      save_step(folder / "a/b/ckpt", step, exchange);
      EXPECT_EQ(step_at(folder / "a/b/ckpt"), step);
      EXPECT_EQ(entries(folder / "a/b"), 1u);
    }
  }
}

TEST(Staging, TakesPathsAsUsersGiveThem) {
  const TempFolder folder;
  save_step(folder / "ckpt/", 1, true);
  EXPECT_EQ(step_at(folder / "ckpt"), 1);
  fs::create_directory(folder / "empty");
  save_step(folder / "empty", 2, true);
  EXPECT_EQ(step_at(folder / "x/../empty/"), 2);
  fs::create_directory_symlink(folder / "ckpt", folder / "latest");
  save_step(folder / "latest", 3, true);
  EXPECT_TRUE(fs::is_symlink(folder / "latest"));
  EXPECT_EQ(step_at(folder / "ckpt"), 3);
  EXPECT_THROW(Staging(""), CheckpointError);
}

TEST(StagingFault, LeavesWhatIsNoCheckpoint) {
  const TempFolder folder;
  fs::create_directory(folder / "thesis");
  spill(folder / "thesis/chapter", "words");
  spill(folder / "file", "words");
  for (const char* name : {"thesis", "file"}) {
    const auto message = message_of<CheckpointError>([&] { Staging staging(folder / name); });
    EXPECT_NE(message.find("is not a checkpoint"), std::string::npos) << message;
  }
  EXPECT_EQ(testing::slurp(folder / "thesis/chapter"), "words");
  // Neighbours with similar names are not what a save left.
  fs::create_directory(folder / "ckpt.old-backup");
  fs::create_directory(folder / "ckpt.tmp-1");
  save_step(folder / "ckpt", 1, true);
  EXPECT_TRUE(fs::exists(folder / "ckpt.old-backup"));
  EXPECT_TRUE(fs::exists(folder / "ckpt.tmp-1"));
}

TEST(StagingFault, AnErrorLeavesThePreviousOne) {
  const TempFolder folder;
  save_step(folder / "ckpt", 1, true);
  {
    Staging staging(folder / "ckpt");
    spill(staging.folder() + "/" + rank_file(0, 1), "half");
  }
  EXPECT_EQ(step_at(folder / "ckpt"), 1);
  EXPECT_EQ(entries(folder.path()), 1u);
  const auto message = message_of<CheckpointError>([&] { find(folder / "none"); });
  EXPECT_NE(message.find("there is no checkpoint"), std::string::npos) << message;
  fs::remove(folder / "ckpt/index.json");
  EXPECT_THROW(find(folder / "ckpt"), CheckpointError);
}

// Runs a save in a child that is stopped at each system call, and kills it at the `stops`-th. True if it got that far.
bool save_and_kill(const std::string& path, int64_t step, bool exchange, int stops) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) {
      ::_exit(3);
    }
    ::raise(SIGSTOP);
    save_step(path, step, exchange);
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  for (int i = 0; i < stops && WIFSTOPPED(status); ++i) {
    ::ptrace(PTRACE_SYSCALL, child, nullptr, nullptr);
    ::waitpid(child, &status, 0);
  }
  if (!WIFSTOPPED(status)) {
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "the save failed, status " << status;
    return false;
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  return true;
}

bool can_trace() {
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) == 0 ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// The state of the disk changes only in system calls, so a kill before and after each one is a kill at any moment.
TEST(StagingFault, AKillAtAnySystemCallLeavesAWholeCheckpoint) {
  if (!can_trace()) {
    GTEST_SKIP() << "ptrace is not allowed here";
  }
  for (const bool exchange : {true, false}) {
    const TempFolder folder;
    const std::string path = folder / "ckpt";
    save_step(path, 1, exchange);
    int64_t before = 1;
    int stops = 1;
    bool killed = true;
    for (; killed; ++stops) {
      ASSERT_LT(stops, 5000);
      const int64_t step = before + 1;
      killed = save_and_kill(path, step, exchange, stops);
      const int64_t found = step_at(path);
      ASSERT_TRUE(found == before || found == step) << "step " << found << " after a kill at stop " << stops;
      ASSERT_TRUE(killed || found == step);
      before = found;
    }
    EXPECT_GT(stops, 50);
    EXPECT_EQ(entries(folder.path()), 1u) << "the last, whole save clears what the killed ones left";
  }
}

}  // namespace
}  // namespace fsdp::checkpoint
