#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define OMPI_SKIP_MPICXX 1  // the C++ bindings, which are gone from the standard
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <ATen/core/Tensor.h>

namespace fsdp::comm::mpi {

/// std::runtime_error with MPI's words if `code` is an error.
void check(int code, const char* call);

/// A collective under way, with all that MPI reads and writes until it is complete. MPI cannot take one back: one that
/// nobody waits for any more is kept until it completes, if ever.
class Operation {
 public:
  Operation(std::vector<at::Tensor> tensors, std::vector<int> counts)
      : tensors(std::move(tensors)), counts(std::move(counts)) {}
  /// True once it is complete. Any thread; does nothing where another one is at it.
  bool poll();
  bool done() const { return done_.load(std::memory_order_acquire); }

  const std::vector<at::Tensor> tensors;
  std::vector<int> counts;  // the lengths and places that some calls take
  MPI_Request request = MPI_REQUEST_NULL;

 private:
  std::mutex mutex_;  // MPI_Test on one request: by one thread at a time
  std::atomic<bool> done_{false};
};

using OperationPtr = std::shared_ptr<Operation>;

}  // namespace fsdp::comm::mpi
