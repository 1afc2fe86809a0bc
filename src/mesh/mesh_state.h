#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <c10/core/DeviceType.h>

#include "comm/channel.h"

namespace fsdp::mesh {

class World;

/// The lanes that a mesh's users open on it. Collectives of one lane never wait for those of another.
enum class Lane {
  kGather,  // all-gathers of parameters, and everything that must be ordered with them
  kReduce,  // reduce-scatters of gradients
};

/// What a DeviceMesh refers to. Channels are opened on first use (collective among their members) and shared by
/// every model on the mesh.
class MeshState {
 public:
  MeshState(std::shared_ptr<World> world, c10::DeviceType device, std::vector<int64_t> shape,
            std::vector<std::string> names, std::vector<int> ranks);

  const std::shared_ptr<World>& world() const;
  c10::DeviceType device_type() const;
  const std::vector<int64_t>& shape() const;
  const std::vector<std::string>& names() const;
  const std::vector<int>& ranks() const;  // row-major
  int64_t coordinate(int64_t axis) const;

  /// The channel among the ranks that differ from this one only in `axis`. Channel rank = coordinate(axis).
  std::shared_ptr<comm::Channel> axis_channel(int64_t axis, Lane lane);
  /// The channel among the `ranks` consecutive ones of those, a factor of their number, that this rank is one of.
  /// Channel rank = coordinate(axis) % ranks.
  std::shared_ptr<comm::Channel> part_channel(int64_t axis, int64_t ranks, Lane lane);
  /// The channel among all ranks of the mesh; on a 1D mesh it is axis_channel(0, lane).
  std::shared_ptr<comm::Channel> flat_channel(Lane lane);

  /// The mesh of this rank along `names`, in that order. The same object for the same names, so that its channels
  /// are opened once. Not for all names in their order: that is this mesh.
  std::shared_ptr<MeshState> submesh(const std::vector<std::string>& names);
  /// An axis of another mesh: those of this one that it joins, the last varying fastest. Of none: one rank.
  struct Joined {
    std::string name;
    std::vector<std::string> of;
  };
  /// The mesh of this rank along such axes. The same object for the same axes. InvalidArgument for an axis that this
  /// mesh does not have, or for one that is named twice.
  std::shared_ptr<MeshState> joined(const std::vector<Joined>& axes);
  /// All axes as one.
  std::shared_ptr<MeshState> flattened(const std::string& name);

 private:
  int64_t axis_index(const std::string& name) const;
  /// This mesh's ranks that share this rank's coordinates but for `axes`, row-major over `axes`.
  std::vector<int> ranks_along(const std::vector<int64_t>& axes) const;
  /// `ranks` is asked for only where the channel is opened: listing them costs with the size of the mesh.
  std::shared_ptr<comm::Channel> channel(const std::string& label, const std::function<std::vector<int>()>& ranks);

  std::shared_ptr<World> world_;
  c10::DeviceType device_type_;
  std::vector<int64_t> shape_;
  std::vector<std::string> names_;
  std::vector<int> ranks_;
  std::vector<int64_t> coordinates_;

  std::mutex mutex_;  // guards the caches: models of one rank may be built on several threads
  std::map<std::string, std::shared_ptr<comm::Channel>> channels_;
  std::map<std::string, std::shared_ptr<MeshState>> derived_;
};

}  // namespace fsdp::mesh
