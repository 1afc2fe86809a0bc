#include "comm/backends/mpi/runtime.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include <c10/util/StringUtil.h>
#include <fsdp/error.h>

namespace fsdp::comm::mpi {
namespace {

// A waiting rank asks MPI itself; this is for those that compute meanwhile.
constexpr auto kPause = std::chrono::microseconds(100);

/// Whether a launcher of MPI started this process: Open MPI, MPICH and its kin, anything with PMIx.
bool in_a_job() {
  for (const auto* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"}) {
    if (std::getenv(name)) return true;
  }
  return false;
}

}  // namespace

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw std::runtime_error(c10::str(call, ": ", std::string_view(text, static_cast<size_t>(length))));
}

bool Operation::poll() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || done()) return done();
  int flag = 0;
  check(MPI_Test(&request, &flag, MPI_STATUS_IGNORE), "MPI_Test");
  if (flag) done_.store(true, std::memory_order_release);
  return flag != 0;
}

Runtime& Runtime::get() {
  static auto* instance = new Runtime;  // ended by end(), never destroyed
  return *instance;
}

Runtime::Runtime() {
  int started = 0, level = MPI_THREAD_SINGLE;
  check(MPI_Initialized(&started), "MPI_Initialized");
  if (started) {
    check(MPI_Query_thread(&level), "MPI_Query_thread");
  } else if (!in_a_job()) {
    throw NotSupported("the engine mpi needs an MPI job; start the program with mpirun, all ranks in one job");
  } else {
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    ours_ = true;
  }
  if (level != MPI_THREAD_MULTIPLE) {
    throw NotSupported(
        "the engine mpi needs MPI_THREAD_MULTIPLE, and MPI was started with less; call MPI_Init_thread with it, or "
        "leave "
        "the start to libfsdp");
  }
  check(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
  check(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
  check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  thread_ = std::thread([this] { advance(); });
  std::atexit(&Runtime::end);
}

void Runtime::watch(OperationPtr operation) {
  {
    const std::lock_guard lock(mutex_);
    running_.push_back(std::move(operation));
  }
  some_.notify_one();
}

void Runtime::advance() {
  std::unique_lock lock(mutex_);
  while (!ending_) {
    running_.remove_if([](const OperationPtr& operation) {
      try {
        return operation->poll();
      } catch (const std::exception&) {
        return false;  // whoever waits for it meets the same error
      }
    });
    if (running_.empty()) {
      some_.wait(lock);
    } else {
      some_.wait_for(lock, kPause);
    }
  }
}

void Runtime::end() {
  auto& self = get();
  {
    const std::lock_guard lock(self.mutex_);
    self.ending_ = true;
  }
  self.some_.notify_one();
  self.thread_.join();
  int ended = 0;
  MPI_Finalized(&ended);
  // With collectives that never completed it would wait for peers that are gone; the launcher ends those.
  const bool complete =
      std::all_of(self.running_.begin(), self.running_.end(), [](const auto& o) { return o->done(); });
  if (self.ours_ && !ended && complete) MPI_Finalize();
}

}  // namespace fsdp::comm::mpi
