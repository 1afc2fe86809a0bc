#pragma once
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <fsdp/device_mesh.h>
#include <fsdp/export.h>

namespace fsdp {

/// How a tensor lies on one mesh axis.
struct Placement {
  enum class Kind {
    kReplicate,
    kShard,
    kFlat,  ///< a stretch of the flattened tensor's elements; where it begins and ends depends on its neighbours
  };
  Kind kind = Kind::kReplicate;
  int64_t dim = 0;  ///< the tensor's dim that is cut; only for kShard
  bool operator==(const Placement& o) const { return kind == o.kind && (kind != Kind::kShard || dim == o.dim); }
};

/// A look at a sharded tensor: a parameter of a sharded model, its gradient, or an optimizer's state for it. Cheap;
/// holds the tensor.
class FSDP_API DTensor {
 public:
  explicit DTensor(at::Tensor sharded);

  // A sharded tensor that is no parameter's, a buffer or a mask for one: cut along `dim` over the last axis of `mesh`,
  // in blocks of ceil(size / ranks) as parameters are, and replicated over the first of two axes. dim > 0 must be a
  // multiple of that axis. Operators take it beside parameters that lie alike.
  /// Of which `local` is this rank's part (kept, not copied). Never communicates. InvalidArgument if its sizes are not
  /// those of this rank's part of `sizes`.
  static DTensor from_local(at::Tensor local, const DeviceMesh& mesh, std::vector<int64_t> sizes, int64_t dim = 0);
  /// Of `whole`, which every rank has alike: this rank keeps a copy of its part. Never communicates.
  static DTensor distribute(const at::Tensor& whole, const DeviceMesh& mesh, int64_t dim = 0);
  /// The same values cut along another dim, a new tensor. Collective; costs a full_tensor().
  DTensor redistribute(int64_t dim) const;

  /// The sharded tensor that this looks at.
  const at::Tensor& tensor() const { return tensor_; }
  /// Global sizes.
  at::IntArrayRef sizes() const { return tensor_.sizes(); }
  /// The parameter's dotted name (FQN) where it is known.
  const std::string& name() const;
  const std::vector<Placement>& placements() const;
  const DeviceMesh& device_mesh() const;
  /// This rank's rows: shares memory with the sharded tensor. Sizes {rows of this rank, ...}; may have 0 rows.
  /// Of a tensor that is cut by elements (Kind::kFlat): those that this rank holds, 1-D, may be none.
  at::Tensor to_local() const;
  /// Every rank's part together, a new plain tensor, equal on every rank. Collective among the mesh; costs one
  /// all-gather of this tensor alone.
  at::Tensor full_tensor() const;

 private:
  at::Tensor tensor_;
};

/// True if `tensor` is a sharded tensor of libfsdp.
FSDP_API bool is_dtensor(const at::Tensor& tensor);

/// InvalidArgument if `tensor` is an ordinary tensor.
FSDP_API DTensor dtensor(const at::Tensor& tensor);

/// Global sizes, placements and this rank's values. Never communicates.
FSDP_API std::ostream& operator<<(std::ostream& out, const DTensor& tensor);

}  // namespace fsdp
