#pragma once
#include <map>
#include <memory>
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
  /// The channel among all ranks of the mesh; on a 1D mesh it is axis_channel(0, lane).
  std::shared_ptr<comm::Channel> flat_channel(Lane lane);
  // (private members are the implementer's)
  struct Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace fsdp::mesh
