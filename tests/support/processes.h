#pragma once
#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace fsdp::testing {

struct ProcessOptions {
  /// Added to the environment of every rank; the names that a launcher would set may be overridden here too.
  std::map<std::string, std::string> environment{};
  /// What the body finds in process_arguments().
  std::vector<std::string> arguments{};
  /// After this the ranks that still run are killed and the run counts as failed.
  std::chrono::seconds timeout{60};
  /// Ranks that are meant to fail or to be killed: run_processes does not complain about them.
  std::vector<int> expected_to_fail{};
};

struct ProcessResult {
  int exit_code = 0;  ///< 128 + signal for a rank that a signal ended
  std::string output;
  std::chrono::milliseconds lifetime{0};
};

/// Runs the body registered as `body` in `ranks` new processes of this program, with the environment that torchrun
/// gives (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: a free port). A rank fails by an exception, by a
/// failed EXPECT_* or ASSERT_*, or by a signal; for each that was not expected to, a test failure with its output is
/// added. Returns every rank's result.
std::vector<ProcessResult> run_processes(int ranks, const std::string& body, const ProcessOptions& options = {});

/// In a body: ProcessOptions::arguments.
const std::vector<std::string>& process_arguments();

/// Registers a body at static initialisation.
struct ProcessBody {
  ProcessBody(const std::string& name, std::function<void()> body);
};

/// If this process is a rank that run_processes started: runs its body and sets the exit code. For main().
bool run_body_if_rank(int& exit_code);

}  // namespace fsdp::testing

/// Defines what run_processes(n, "name") runs on each rank: FSDP_PROCESS_BODY(name) { fsdp::init_process_group(); ... }
#define FSDP_PROCESS_BODY(name)                                                                    \
  static void fsdp_process_body_##name();                                                          \
  static const ::fsdp::testing::ProcessBody fsdp_register_##name(#name, fsdp_process_body_##name); \
  static void fsdp_process_body_##name()
