#include "tensor/spec.h"

#include "mesh/mesh_state.h"

namespace fsdp::tensor {

SpecPtr Spec::of_parameter(std::string name, const DeviceMesh& mesh, std::vector<int64_t> sizes) {
  auto spec = std::make_shared<Spec>();
  spec->name = std::move(name);
  spec->mesh = mesh;
  int64_t numel = 1;
  for (auto size : sizes) numel *= size;
  const int64_t rows = sizes.empty() ? 1 : sizes[0];
  spec->pieces = {{rows, rows == 0 ? 0 : numel / rows}};
  spec->sizes = std::move(sizes);
  spec->placements.resize(static_cast<size_t>(mesh.ndim()));
  spec->placements.back() = {Placement::Kind::kShard, 0};
  return spec;
}

SpecPtr Spec::with_sizes(std::vector<int64_t> new_sizes, std::vector<Piece> new_pieces, bool is_flat) const {
  auto spec = std::make_shared<Spec>(*this);
  spec->sizes = std::move(new_sizes);
  spec->pieces = std::move(new_pieces);
  spec->flat = is_flat;
  return spec;
}

shard::RowRange Spec::rows(const Piece& piece) const {
  return shard::rows_of_rank(piece.rows, mesh.shape().back(), mesh.coordinate(shard_axis()));
}

int64_t Spec::local_numel() const {
  int64_t numel = 0;
  for (const auto& piece : pieces) numel += rows(piece).size() * piece.row_numel;
  return numel;
}

std::vector<int64_t> Spec::local_sizes() const {
  if (flat) return {local_numel()};
  auto local = sizes;
  if (local.empty()) local.push_back(1);
  local[0] = rows(pieces[0]).size();
  return local;
}

bool Spec::lies_like(const Spec& other) const {
  // Flat or not: a flat view of a one-dimensional tensor is that tensor.
  return this == &other || (sizes == other.sizes && pieces == other.pieces && mesh == other.mesh);
}

std::shared_ptr<comm::Channel> Spec::channel() const {
  return mesh.state()->axis_channel(shard_axis(), mesh::Lane::kGather);
}

}  // namespace fsdp::tensor
