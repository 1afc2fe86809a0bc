#pragma once
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/DeviceType.h>
#include <fsdp/export.h>

namespace fsdp {
namespace mesh {
class MeshState;
}

/// Ranks arranged on named axes: {"dp"} for plain sharding, {"replicate", "shard"} for hybrid. A cheap value; copies
/// refer to the same mesh. Ranks are laid out row-major: the last axis varies fastest.
class FSDP_API DeviceMesh {
 public:
  DeviceMesh() = default;  ///< no mesh; `defined()` is false
  explicit DeviceMesh(std::shared_ptr<mesh::MeshState> state) : state_(std::move(state)) {}

  bool defined() const { return state_ != nullptr; }
  c10::DeviceType device_type() const;
  int64_t ndim() const;
  /// Number of ranks in the mesh.
  int64_t size() const;
  const std::vector<int64_t>& shape() const;
  const std::vector<std::string>& names() const;
  /// This rank's index along `axis`.
  int64_t coordinate(int64_t axis) const;
  /// World ranks of this mesh, row-major.
  const std::vector<int>& ranks() const;

  /// The submesh of one axis, or of several in the given order, that this rank belongs to.
  /// InvalidArgument with the known names if there is no such axis.
  DeviceMesh operator[](const std::string& name) const;
  DeviceMesh operator[](const std::vector<std::string>& names) const;
  /// All axes as one, under `name`.
  DeviceMesh flatten(const std::string& name = "flat") const;

  bool operator==(const DeviceMesh& other) const;
  bool operator!=(const DeviceMesh& other) const { return !(*this == other); }

  /// The implementation; for libfsdp itself.
  const std::shared_ptr<mesh::MeshState>& state() const { return state_; }

 private:
  std::shared_ptr<mesh::MeshState> state_;
};

/// "DeviceMesh(cpu, dp=2, tp=4)"
FSDP_API std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh);

/// Arranges the world's ranks as `shape` (for example {2, 4}) with one name an axis. Collective: every rank of the
/// world calls it with the same arguments. InvalidArgument, on every rank, if the product of `shape` is not the world
/// size, if a name repeats, if counts differ, or if ranks bring different arguments. Names default to "dim_0", "dim_1",
/// ... Costs one small all-reduce.
FSDP_API DeviceMesh init_device_mesh(c10::DeviceType device, std::vector<int64_t> shape,
                                     std::vector<std::string> names = {});

}  // namespace fsdp
