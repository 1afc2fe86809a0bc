#include "mesh/mesh_state.h"

#include <algorithm>
#include <numeric>

#include <c10/util/StringUtil.h>
#include <fsdp/error.h>

#include "mesh/world.h"

namespace fsdp::mesh {
namespace {

const char* lane_name(Lane lane) { return lane == Lane::kGather ? "gather" : "reduce"; }

}  // namespace

MeshState::MeshState(std::shared_ptr<World> world, c10::DeviceType device, std::vector<int64_t> shape,
                     std::vector<std::string> names, std::vector<int> ranks)
    : world_(std::move(world)),
      device_type_(device),
      shape_(std::move(shape)),
      names_(std::move(names)),
      ranks_(std::move(ranks)),
      coordinates_(shape_.size()) {
  const auto self = std::find(ranks_.begin(), ranks_.end(), world_->rank());
  if (self == ranks_.end()) {
    throw InvariantError(c10::str("rank ", world_->rank(), " is not part of the mesh that it makes"));
  }
  auto rest = static_cast<int64_t>(self - ranks_.begin());
  for (auto axis = shape_.size(); axis-- > 0;) {
    coordinates_[axis] = rest % shape_[axis];
    rest /= shape_[axis];
  }
}

const std::shared_ptr<World>& MeshState::world() const { return world_; }
c10::DeviceType MeshState::device_type() const { return device_type_; }
const std::vector<int64_t>& MeshState::shape() const { return shape_; }
const std::vector<std::string>& MeshState::names() const { return names_; }
const std::vector<int>& MeshState::ranks() const { return ranks_; }

int64_t MeshState::coordinate(int64_t axis) const {
  if (axis < 0 || axis >= static_cast<int64_t>(shape_.size())) {
    throw InvalidArgument(
        c10::str("the mesh has no axis ", axis, "; it has ", shape_.size(), ": ", c10::Join(", ", names_)));
  }
  return coordinates_[axis];
}

std::shared_ptr<comm::Channel> MeshState::axis_channel(int64_t axis, Lane lane) {
  coordinate(axis);  // checks it
  return channel(c10::str(names_[axis], ".", lane_name(lane)), [&] { return ranks_along({axis}); });
}

std::shared_ptr<comm::Channel> MeshState::part_channel(int64_t axis, int64_t ranks, Lane lane) {
  const int64_t first = coordinate(axis) / ranks * ranks;
  return channel(c10::str(names_[axis], "/", ranks, ".", lane_name(lane)), [&] {
    const auto all = ranks_along({axis});
    return std::vector<int>(all.begin() + first, all.begin() + first + ranks);
  });
}

std::shared_ptr<comm::Channel> MeshState::flat_channel(Lane lane) {
  return shape_.size() == 1 ? axis_channel(0, lane)
                            : channel(c10::str(c10::Join("+", names_), ".", lane_name(lane)), [&] { return ranks_; });
}

std::shared_ptr<comm::Channel> MeshState::channel(const std::string& label,
                                                  const std::function<std::vector<int>()>& ranks) {
  std::lock_guard lock(mutex_);
  auto& cached = channels_[label];
  if (!cached) {
    cached = world_->open_channel(ranks(), label);
  }
  return cached;
}

std::shared_ptr<MeshState> MeshState::submesh(const std::vector<std::string>& names) {
  if (names.empty()) throw InvalidArgument("a submesh needs one or more axes, got none");
  std::vector<Joined> axes;
  for (const auto& name : names) axes.push_back({name, {name}});
  return joined(axes);
}

std::shared_ptr<MeshState> MeshState::joined(const std::vector<Joined>& axes) {
  std::vector<int64_t> indices, shape;
  std::vector<std::string> names, given;
  std::string key = "axes";
  for (const auto& axis : axes) {
    shape.push_back(1);
    names.push_back(axis.name);
    key += " " + axis.name + "=" + c10::Join(",", axis.of);
    for (const auto& name : axis.of) {
      indices.push_back(axis_index(name));
      shape.back() *= shape_[indices.back()];
      given.push_back(name);
    }
  }
  auto sorted = indices;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    throw InvalidArgument(c10::str("each axis of the mesh may be used once, got {", c10::Join(", ", given), "}"));
  }
  std::lock_guard lock(mutex_);
  auto& cached = derived_[key];
  if (!cached) {
    cached =
        std::make_shared<MeshState>(world_, device_type_, std::move(shape), std::move(names), ranks_along(indices));
  }
  return cached;
}

std::shared_ptr<MeshState> MeshState::flattened(const std::string& name) {
  std::lock_guard lock(mutex_);
  auto& cached = derived_["flat " + name];
  if (!cached) {
    const std::vector<int64_t> shape{static_cast<int64_t>(ranks_.size())};
    cached = std::make_shared<MeshState>(world_, device_type_, shape, std::vector<std::string>{name}, ranks_);
  }
  return cached;
}

int64_t MeshState::axis_index(const std::string& name) const {
  const auto found = std::find(names_.begin(), names_.end(), name);
  if (found == names_.end()) {
    throw InvalidArgument(c10::str("the mesh has no axis '", name, "'; its axes are: ", c10::Join(", ", names_)));
  }
  return found - names_.begin();
}

std::vector<int> MeshState::ranks_along(const std::vector<int64_t>& axes) const {
  std::vector<int64_t> strides(shape_.size(), 1);
  for (auto axis = shape_.size(); axis-- > 1;) {
    strides[axis - 1] = strides[axis] * shape_[axis];
  }
  int64_t origin = std::inner_product(coordinates_.begin(), coordinates_.end(), strides.begin(), int64_t{0});
  for (const auto axis : axes) {
    origin -= coordinates_[axis] * strides[axis];
  }
  std::vector<int64_t> positions{origin};
  for (const auto axis : axes) {
    std::vector<int64_t> next;
    for (const auto position : positions) {
      for (int64_t i = 0; i < shape_[axis]; ++i) {
        next.push_back(position + i * strides[axis]);
      }
    }
    positions.swap(next);
  }
  std::vector<int> ranks;
  for (const auto position : positions) {
    ranks.push_back(ranks_[position]);
  }
  return ranks;
}

}  // namespace fsdp::mesh
