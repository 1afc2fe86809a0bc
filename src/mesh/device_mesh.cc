#include <fsdp/device_mesh.h>

#include <numeric>
#include <ostream>
#include <set>
#include <sstream>

#include <c10/util/StringUtil.h>
#include <fsdp/error.h>

#include "mesh/compare_texts.h"
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

/// What is wrong with the arguments, "" if nothing is.
std::string problem_with(const std::vector<int64_t>& shape, const std::vector<std::string>& names, int world_size) {
  if (shape.empty()) {
    return "the shape is empty; give one size an axis, for example {world_size()}";
  }
  int64_t product = 1;
  for (const auto size : shape) {
    if (size < 1) {
      return c10::str("the shape {", c10::Join(", ", shape), "} has a size below 1");
    }
    product *= size;
  }
  if (product != world_size) {
    return c10::str("the shape {", c10::Join(", ", shape), "} is of ", product, " ranks, but the world has ",
                    world_size, "; the product must be the world size");
  }
  if (names.size() != shape.size()) {
    return c10::str("there are ", names.size(), " names for ", shape.size(), " axes; give one name an axis");
  }
  const std::set<std::string> distinct(names.begin(), names.end());
  if (distinct.size() != names.size() || distinct.count("")) {
    return c10::str("the axis names {", c10::Join(", ", names), "} must differ and not be empty");
  }
  return "";
}

void check_on_all_ranks(mesh::World& world, const std::string& arguments, const std::string& problem) {
  const auto who = c10::str("init_device_mesh on rank ", world.rank(), ": ");
  const auto texts = world.size() == 1 ? std::vector<std::string>()
                                       : mesh::compare_texts(world.channel(), arguments, !problem.empty());
  if (!problem.empty()) {
    throw InvalidArgument(who + problem);
  }
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank] != arguments) {
      throw InvalidArgument(c10::str(who, "rank ", rank, " asks for ", texts[rank], ", this rank for ", arguments,
                                     "; every rank must make the same meshes in the same order"));
    }
  }
  if (!texts.empty()) {
    throw InvalidArgument(c10::str(who, "another rank cannot make this mesh; its own error says why"));
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
  const auto problem = problem_with(shape, names, world->size());
  std::vector<int> ranks(world->size());
  std::iota(ranks.begin(), ranks.end(), 0);
  std::ostringstream arguments;
  arguments << "(" << c10::DeviceTypeName(device, /*lower_case=*/true) << ", {" << c10::Join(", ", shape) << "}, {"
            << c10::Join(", ", names) << "})";
  check_on_all_ranks(*world, arguments.str(), problem);
  return DeviceMesh(
      std::make_shared<mesh::MeshState>(world, device, std::move(shape), std::move(names), std::move(ranks)));
}

}  // namespace fsdp
