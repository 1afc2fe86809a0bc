#include "ranks.h"

#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "mesh/world.h"

namespace fsdp::testing {
namespace {

std::string message(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "something that is not a std::exception";
  }
}

/// New threads take the number of kernel threads from the one that starts them.
class OneKernelThread {
 public:
  OneKernelThread() : before_(at::get_num_threads()) { at::set_num_threads(1); }
  ~OneKernelThread() { at::set_num_threads(before_); }
  OneKernelThread(const OneKernelThread&) = delete;
  OneKernelThread& operator=(const OneKernelThread&) = delete;

 private:
  int before_;
};

}  // namespace

void run_ranks(int ranks, const std::function<void(int rank)>& body, std::chrono::milliseconds timeout) {
  const OneKernelThread one_kernel_thread;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> errors(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      mesh::World::set_thread_world(std::make_shared<mesh::World>("inproc", store, rank, ranks, rank, timeout));
      try {
        body(rank);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
      mesh::World::set_thread_world(nullptr);
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  std::string report;
  for (int rank = 0; rank < ranks; ++rank) {
    if (errors[rank]) {
      report += (report.empty() ? "rank " : "\nrank ") + std::to_string(rank) + ": " + message(errors[rank]);
    }
  }
  if (!report.empty()) {
    throw std::runtime_error(report);
  }
}

}  // namespace fsdp::testing
