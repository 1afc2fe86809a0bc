#include "tensor/spec.h"

#include <algorithm>

#include <ATen/ops/cat.h>

#include "engine/sharded_param.h"
#include "mesh/mesh_state.h"

namespace fsdp::tensor {

SpecPtr Spec::of_parameter(std::string name, const DeviceMesh& mesh, std::vector<int64_t> sizes, int64_t dim,
                           const Piece& piece) {
  auto spec = std::make_shared<Spec>();
  spec->name = std::move(name);
  spec->mesh = mesh;
  spec->pieces = {piece};
  spec->sizes = std::move(sizes);
  spec->placements.resize(static_cast<size_t>(mesh.ndim()));
  spec->cut_along(dim);
  return spec;
}

SpecPtr Spec::flattened(std::vector<int64_t> size, std::vector<Piece> new_pieces) const {
  auto spec = std::make_shared<Spec>(*this);
  spec->sizes = std::move(size);
  spec->pieces = std::move(new_pieces);
  spec->flat = true;
  spec->cut_along(0);
  return spec;
}

SpecPtr Spec::shaped(std::vector<int64_t> new_sizes, int64_t cut) const {
  auto spec = std::make_shared<Spec>(*this);
  spec->sizes = std::move(new_sizes);
  spec->flat = false;
  spec->cut_along(cut);
  return spec;
}

void Spec::cut_along(int64_t cut) {
  dim = cut;
  const bool of_line = !pieces.empty() && pieces[0].line > 0;
  placements.back() = of_line ? Placement{Placement::Kind::kFlat} : Placement{Placement::Kind::kShard, cut};
}

shard::RowRange Spec::rows(const Piece& piece) const {
  return piece.rows_of(mesh.shape().back(), mesh.coordinate(shard_axis()));
}

int64_t Spec::local_numel() const {
  int64_t numel = 0;
  for (const auto& piece : pieces) numel += local_numel(piece);
  return numel;
}

at::Tensor Spec::part_of(const at::Tensor& whole) const {
  if (!by_elements()) return engine::narrow_rows(whole, dim, rows(pieces[0]));
  const auto line = whole.reshape({-1});
  std::vector<at::Tensor> parts;
  int64_t base = 0;
  for (const auto& piece : pieces) {
    const auto range = rows(piece);
    parts.push_back(line.narrow(0, base, piece.units())
                        .view({piece.slabs, piece.slab_units()})
                        .narrow(1, range.begin * piece.row_units, range.size() * piece.row_units)
                        .reshape({-1}));
    base += piece.units();
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts);
}

std::vector<int64_t> Spec::local_sizes() const {
  if (by_elements()) return {local_numel()};
  auto local = sizes;
  if (local.empty()) local.push_back(1);
  local[static_cast<size_t>(dim)] = rows(pieces[0]).size();
  return local;
}

bool Spec::lies_like(const Spec& other) const {
  // Flat or not: a flat view of a one-dimensional tensor is that tensor.
  const auto same = [](const Piece& a, const Piece& b) {
    return a.rows == b.rows && a.row_units == b.row_units && a.slabs == b.slabs && a.line == b.line && a.lead == b.lead;
  };
  return this == &other || (sizes == other.sizes && mesh == other.mesh &&
                            std::equal(pieces.begin(), pieces.end(), other.pieces.begin(), other.pieces.end(), same));
}

std::shared_ptr<comm::Channel> Spec::channel() const {
  return mesh.state()->axis_channel(shard_axis(), mesh::Lane::kGather);
}

at::Tensor Spec::for_channel(const at::Tensor& tensor) const {
  return tensor.device().type() == mesh.device_type() ? tensor : tensor.to(c10::Device(mesh.device_type()));
}

}  // namespace fsdp::tensor
