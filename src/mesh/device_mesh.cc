#include <fsdp/device_mesh.h>

#include <numeric>
#include <ostream>
#include <set>

#include <c10/util/StringUtil.h>
#include <fsdp/error.h>

#include "mesh/mesh_state.h"
#include "mesh/world.h"

namespace fsdp {
namespace {

mesh::MeshState& checked(const std::shared_ptr<mesh::MeshState>& state) {
  if (!state) {
    throw InvalidArgument("this DeviceMesh is undefined; make one with init_device_mesh");
  }
  return *state;
}

void check_shape(const std::vector<int64_t>& shape, const std::vector<std::string>& names, const mesh::World& world) {
  const auto who = c10::str("init_device_mesh on rank ", world.rank(), ": ");
  if (shape.empty()) {
    throw InvalidArgument(who + "the shape is empty; give one size an axis, for example {world_size()}");
  }
  int64_t product = 1;
  for (const auto size : shape) {
    if (size < 1) {
      throw InvalidArgument(c10::str(who, "the shape {", c10::Join(", ", shape), "} has a size below 1"));
    }
    product *= size;
  }
  if (product != world.size()) {
    throw InvalidArgument(c10::str(who, "the shape {", c10::Join(", ", shape), "} is of ", product,
                                   " ranks, but the world has ", world.size(), "; the product must be the world size"));
  }
  if (names.size() != shape.size()) {
    throw InvalidArgument(
        c10::str(who, "there are ", names.size(), " names for ", shape.size(), " axes; give one name an axis"));
  }
  const std::set<std::string> distinct(names.begin(), names.end());
  if (distinct.size() != names.size() || distinct.count("")) {
    throw InvalidArgument(c10::str(who, "the axis names {", c10::Join(", ", names), "} must differ and not be empty"));
  }
}

}  // namespace

c10::DeviceType DeviceMesh::device_type() const { return checked(state_).device_type(); }
int64_t DeviceMesh::ndim() const { return static_cast<int64_t>(checked(state_).shape().size()); }
int64_t DeviceMesh::size() const { return static_cast<int64_t>(checked(state_).ranks().size()); }
const std::vector<int64_t>& DeviceMesh::shape() const { return checked(state_).shape(); }
const std::vector<std::string>& DeviceMesh::names() const { return checked(state_).names(); }
int64_t DeviceMesh::coordinate(int64_t axis) const { return checked(state_).coordinate(axis); }
const std::vector<int>& DeviceMesh::ranks() const { return checked(state_).ranks(); }

DeviceMesh DeviceMesh::operator[](const std::string& name) const { return (*this)[std::vector<std::string>{name}]; }

DeviceMesh DeviceMesh::operator[](const std::vector<std::string>& names) const {
  return names == this->names() ? *this : DeviceMesh(state_->submesh(names));
}

DeviceMesh DeviceMesh::flatten(const std::string& name) const {
  return names() == std::vector<std::string>{name} ? *this : DeviceMesh(state_->flattened(name));
}

bool DeviceMesh::operator==(const DeviceMesh& other) const {
  if (state_ == other.state_) {
    return true;
  }
  return state_ && other.state_ && state_->world() == other.state_->world() && device_type() == other.device_type() &&
         shape() == other.shape() && names() == other.names() && ranks() == other.ranks();
}

std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh) {
  if (!mesh.defined()) {
    return out << "DeviceMesh(undefined)";
  }
  out << "DeviceMesh(" << c10::DeviceTypeName(mesh.device_type(), /*lower_case=*/true);
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    out << ", " << mesh.names()[axis] << "=" << mesh.shape()[axis];
  }
  return out << ")";
}

DeviceMesh init_device_mesh(c10::DeviceType device, std::vector<int64_t> shape, std::vector<std::string> names) {
  const auto world = mesh::World::current();
  if (names.empty()) {
    for (size_t axis = 0; axis < shape.size(); ++axis) {
      names.push_back(c10::str("dim_", axis));
    }
  }
  check_shape(shape, names, *world);
  std::vector<int> ranks(world->size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return DeviceMesh(
      std::make_shared<mesh::MeshState>(world, device, std::move(shape), std::move(names), std::move(ranks)));
}

}  // namespace fsdp
