#pragma once
#include <condition_variable>
#include <list>
#include <mutex>
#include <thread>

#include "comm/backends/mpi/operation.h"

namespace fsdp::comm::mpi {

/// MPI in this process: started at the first use unless the program did, ended with the process. Its thread makes
/// collectives advance while the ranks compute.
class Runtime {
 public:
  /// NotSupported: no launcher of MPI started this process, or the program started MPI without MPI_THREAD_MULTIPLE.
  static Runtime& get();

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// From now on `operation` advances by itself.
  void watch(OperationPtr operation);

 private:
  Runtime();
  void advance();
  static void end();

  int rank_ = 0, size_ = 1;
  bool ours_ = false;  // MPI is ours to end
  std::mutex mutex_;
  std::condition_variable some_;
  std::list<OperationPtr> running_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace fsdp::comm::mpi
