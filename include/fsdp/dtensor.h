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
  enum class Kind { kReplicate, kShard };
  Kind kind = Kind::kReplicate;
  int64_t dim = 0;  ///< the tensor's dim that is cut; only for kShard
  bool operator==(const Placement& o) const { return kind == o.kind && (kind == Kind::kReplicate || dim == o.dim); }
};

/// A look at a sharded tensor: a parameter of a sharded model, its gradient, or an optimizer's state for it. Cheap;
/// holds the tensor.
class FSDP_API DTensor {
 public:
  explicit DTensor(at::Tensor sharded);

  /// Global sizes.
  at::IntArrayRef sizes() const { return tensor_.sizes(); }
  /// The parameter's dotted name (FQN) where it is known.
  const std::string& name() const;
  const std::vector<Placement>& placements() const;
  const DeviceMesh& device_mesh() const;
  /// This rank's rows: shares memory with the sharded tensor. Sizes {rows of this rank, ...}; may have 0 rows.
  at::Tensor to_local() const;
  /// Every rank's rows together, a new plain tensor, equal on every rank. Collective among the mesh; costs one
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
