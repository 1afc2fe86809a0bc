#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>
#include <thread>

#include <c10/util/StringUtil.h>
#include <fsdp/error.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/backends/backends.h"
#include "comm/backends/mpi/operation.h"
#include "comm/backends/mpi/runtime.h"
#include "comm/exchange_channel.h"

namespace fsdp::comm {
namespace mpi {
namespace {

class MpiWork final : public c10d::Work {
 public:
  MpiWork(OperationPtr operation, std::chrono::milliseconds timeout, std::function<void()> finish)
      : operation_(std::move(operation)), timeout_(timeout), finish_(std::move(finish)) {}

  bool isCompleted() override { return operation_->poll(); }
  bool wait(std::chrono::milliseconds timeout) override {
    const auto begin = std::chrono::steady_clock::now();
    const auto until = begin + (timeout == kNoTimeout ? timeout_ : timeout);
    while (!operation_->poll()) {
      const auto now = std::chrono::steady_clock::now();
      if (now >= until) throw std::runtime_error("Timed out: a peer has not come to it");
      // Short ones are worth a core; long ones leave it to the peers.
      if (now - begin > std::chrono::microseconds(50)) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    if (finish_) std::exchange(finish_, nullptr)();
    return true;
  }

 private:
  OperationPtr operation_;
  std::chrono::milliseconds timeout_;
  std::function<void()> finish_;
};

MPI_Datatype type_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return MPI_FLOAT;
    case at::kDouble:
      return MPI_DOUBLE;
    case at::kByte:
      return MPI_UINT8_T;
    case at::kChar:
      return MPI_INT8_T;
    case at::kInt:
      return MPI_INT32_T;
    case at::kLong:
      return MPI_INT64_T;
    default:
      throw NotSupported(c10::str("MPI cannot reduce tensors of ", type));
  }
}

MPI_Op op_of(const c10d::ReduceOp& op) {
  switch (op) {
    case c10d::ReduceOp::MAX:
      return MPI_MAX;
    case c10d::ReduceOp::MIN:
      return MPI_MIN;
    default:
      return MPI_SUM;
  }
}

/// `unit` bytes as one element, so that lengths fit MPI's ints.
class Unit {
 public:
  explicit Unit(int64_t bytes) {
    check(MPI_Type_contiguous(static_cast<int>(bytes), MPI_BYTE, &type_), "MPI_Type_contiguous");
    check(MPI_Type_commit(&type_), "MPI_Type_commit");
  }
  ~Unit() { MPI_Type_free(&type_); }  // what is under way keeps it
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;
  MPI_Datatype type() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

/// Collectives of a communicator of its own. Bytes move as they are; reductions are MPI's, half types as floats.
class MpiBackend final : public c10d::Backend {
 public:
  explicit MpiBackend(const Rendezvous& rendezvous)
      : Backend(rendezvous.rank, rendezvous.size), timeout_(rendezvous.timeout) {
    auto& runtime = Runtime::get();
    if (runtime.size() < rendezvous.size) {
      throw NotSupported(c10::str("the engine mpi joins ", rendezvous.size, " ranks, but MPI was started with ",
                                  runtime.size(), "; start the program with mpirun, all ranks in one job"));
    }
    // Ranks of this channel to those of MPI's world: launchers number them alike, but nothing says so.
    rendezvous.store->set(std::to_string(rendezvous.rank), std::to_string(runtime.rank()));
    std::vector<int> members;
    for (int rank = 0; rank < rendezvous.size; ++rank) {
      members.push_back(std::stoi(rendezvous.store->get_to_str(std::to_string(rank))));
    }
    MPI_Group world = MPI_GROUP_NULL, group = MPI_GROUP_NULL;
    check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
    check(MPI_Group_incl(world, rendezvous.size, members.data(), &group), "MPI_Group_incl");
    check(MPI_Comm_create_group(MPI_COMM_WORLD, group, 0, &comm_), "MPI_Comm_create_group");
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    MPI_Group_free(&group);
    MPI_Group_free(&world);
  }

  const std::string getBackendName() const override { return "libfsdp-mpi"; }

  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_lengths,
                                               std::vector<int64_t>& in_lengths,
                                               const c10d::AllToAllOptions&) override {
    const auto width = out.element_size();
    const int64_t unit = unit_of({&out_lengths, &in_lengths}, width);
    std::vector<int> counts;  // in: lengths, places; out: lengths, places
    for (const auto* lengths : {&in_lengths, &out_lengths}) {
      for (const auto length : *lengths) counts.push_back(as_int(length * width / unit));
      int64_t at = 0;
      for (const auto length : *lengths) {
        counts.push_back(as_int(at));
        at += length * width / unit;
      }
    }
    const auto n = static_cast<size_t>(getSize());
    return start({out, in}, std::move(counts), "MPI_Ialltoallv", [&](Operation& operation) {
      const Unit type(unit);
      const auto* c = operation.counts.data();
      return MPI_Ialltoallv(in.const_data_ptr(), c, c + n, type.type(), out.data_ptr(), c + 2 * n, c + 3 * n,
                            type.type(), comm_, &operation.request);
    });
  }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    const auto& tensor = tensors[0];
    const bool half = tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
    const auto carried = half ? tensor.to(at::kFloat) : tensor;
    auto finish = half ? std::function<void()>([tensor, carried] { tensor.copy_(carried); }) : nullptr;
    return start(
        {tensor, carried}, {}, "MPI_Iallreduce",
        [&](Operation& operation) {
          return MPI_Iallreduce(MPI_IN_PLACE, carried.data_ptr(), as_int(carried.numel()),
                                type_of(carried.scalar_type()), op_of(options.reduceOp), comm_, &operation.request);
        },
        std::move(finish));
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    const auto& tensor = tensors[0];
    return start({tensor}, {}, "MPI_Ibcast", [&](Operation& operation) {
      const Unit type(tensor.element_size());
      return MPI_Ibcast(tensor.data_ptr(), as_int(tensor.numel()), type.type(), static_cast<int>(options.rootRank),
                        comm_, &operation.request);
    });
  }

 private:
  template <class Issue>
  c10::intrusive_ptr<c10d::Work> start(std::vector<at::Tensor> tensors, std::vector<int> counts, const char* call,
                                       Issue&& issue, std::function<void()> finish = nullptr) {
    auto operation = std::make_shared<Operation>(std::move(tensors), std::move(counts));
    check(issue(*operation), call);
    Runtime::get().watch(operation);
    return c10::make_intrusive<MpiWork>(std::move(operation), timeout_, std::move(finish));
  }

  static int as_int(int64_t value) {
    if (value > std::numeric_limits<int>::max()) {
      throw NotSupported(c10::str("MPI cannot move ", value, " elements at once; shard the model into smaller groups"));
    }
    return static_cast<int>(value);
  }

  /// Bytes of the largest element in which lengths and places are whole numbers that fit.
  static int64_t unit_of(std::initializer_list<const std::vector<int64_t>*> lists, int64_t width) {
    int64_t longest = 0, common = 0;
    for (const auto* lengths : lists) {
      longest = std::max(longest, std::accumulate(lengths->begin(), lengths->end(), int64_t{0}) * width);
      for (const auto length : *lengths) common = std::gcd(common, length * width);
    }
    return longest <= std::numeric_limits<int>::max() ? 1 : common;
  }

  std::chrono::milliseconds timeout_;
  MPI_Comm comm_ = MPI_COMM_NULL;  // until MPI ends: to free it is collective, and ranks drop channels when they like
};

}  // namespace
}  // namespace mpi

void start_mpi() { mpi::Runtime::get(); }

std::shared_ptr<Channel> open_mpi(const Rendezvous& rendezvous) {
  return std::make_shared<ExchangeChannel>("mpi", rendezvous, c10::make_intrusive<mpi::MpiBackend>(rendezvous));
}

}  // namespace fsdp::comm
