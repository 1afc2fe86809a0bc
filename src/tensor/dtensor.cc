#include <fsdp/dtensor.h>

#include <algorithm>
#include <ostream>
#include <sstream>

#include <ATen/core/Formatting.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/StringUtil.h>
#include <fsdp/error.h>

#include "engine/run_views.h"
#include "tensor/facade.h"

namespace fsdp {

namespace {

const tensor::FacadeTag& tag(const at::Tensor& t) { return *tensor::facade_of(t); }

tensor::SpecPtr spec_of(std::string name, const DeviceMesh& mesh, std::vector<int64_t> sizes, int64_t dim) {
  if (!mesh.defined()) throw InvalidArgument("libfsdp: a sharded tensor needs a mesh, got an undefined one");
  const auto dims = std::max<int64_t>(static_cast<int64_t>(sizes.size()), 1), ranks = mesh.shape().back();
  if (dim < 0 || dim >= dims) {
    throw InvalidArgument(c10::str("libfsdp: a tensor of sizes ", at::IntArrayRef(sizes), " has no dim ", dim,
                                   " to be cut along; expected 0 to ", dims - 1));
  }
  tensor::Spec::Piece piece{1, 1, 1};
  for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d) {
    (d == dim ? piece.rows : d < dim ? piece.slabs : piece.row_units) *= sizes[static_cast<size_t>(d)];
  }
  if (dim > 0 && piece.rows % ranks != 0) {
    throw InvalidArgument(c10::str("libfsdp: dim ", dim, " of sizes ", at::IntArrayRef(sizes),
                                   " cannot be cut evenly over ", ranks,
                                   " ranks, which all dims but the first must be; cut along dim 0"));
  }
  return tensor::Spec::of_parameter(std::move(name), mesh, std::move(sizes), dim, piece);
}

}  // namespace

DTensor DTensor::from_local(at::Tensor local, const DeviceMesh& mesh, std::vector<int64_t> sizes, int64_t dim) {
  auto spec = spec_of("", mesh, std::move(sizes), dim);
  if (local.sizes() != at::IntArrayRef(spec->local_sizes()) || is_dtensor(local)) {
    throw InvalidArgument(c10::str("libfsdp: rank ", mesh.coordinate(mesh.ndim() - 1), " of the sharded axis gave a ",
                                   is_dtensor(local) ? "sharded tensor" : "part", " of sizes ", local.sizes(),
                                   " for a tensor of sizes ", at::IntArrayRef(spec->sizes), " cut along dim ", dim,
                                   "; its part has ", at::IntArrayRef(spec->local_sizes())));
  }
  return DTensor(tensor::make_facade(std::move(spec), std::move(local)));
}

DTensor DTensor::distribute(const at::Tensor& whole, const DeviceMesh& mesh, int64_t dim) {
  if (is_dtensor(whole)) {
    throw InvalidArgument("libfsdp: distribute() wants an ordinary tensor, got a sharded one; see redistribute()");
  }
  auto spec = spec_of("", mesh, whole.sizes().vec(), dim);
  at::NoGradGuard no_grad;
  auto local = spec->part_of(whole.detach()).clone(at::MemoryFormat::Contiguous);
  return DTensor(tensor::make_facade(std::move(spec), std::move(local)));
}

DTensor DTensor::redistribute(int64_t dim) const {
  const auto& from = *tag(tensor_).spec;
  auto spec = spec_of(from.name, from.mesh, from.sizes, dim);
  at::NoGradGuard no_grad;
  auto local = spec->part_of(full_tensor()).clone(at::MemoryFormat::Contiguous);
  return DTensor(tensor::make_facade(std::move(spec), std::move(local)));
}

bool is_dtensor(const at::Tensor& tensor) { return tensor::facade_of(tensor) != nullptr; }

DTensor dtensor(const at::Tensor& tensor) { return DTensor(tensor); }

DTensor::DTensor(at::Tensor sharded) : tensor_(std::move(sharded)) {
  if (!is_dtensor(tensor_)) {
    throw InvalidArgument(
        "libfsdp: dtensor() wants a sharded tensor (a parameter after fully_shard, its gradient, or an optimizer's "
        "state for it), got an ordinary tensor");
  }
}

const std::string& DTensor::name() const { return tag(tensor_).spec->name; }
const std::vector<Placement>& DTensor::placements() const { return tag(tensor_).spec->placements; }
const DeviceMesh& DTensor::device_mesh() const { return tag(tensor_).spec->mesh; }
at::Tensor DTensor::to_local() const {
  const auto& t = tag(tensor_);
  return t.local;
}

at::Tensor DTensor::full_tensor() const {
  const auto& facade = tag(tensor_);
  const auto& spec = *facade.spec;
  at::NoGradGuard no_grad;
  const shard::FlatLayout layout(spec.pieces, spec.mesh.shape().back());
  auto channel = spec.channel();
  const auto mine = spec.for_channel(facade.local.detach().contiguous().view({-1}));
  auto flat = at::empty({layout.segments().total()}, mine.options());
  channel->all_gather(flat, mine, layout.segments())->wait();
  // One slab is whole once gathered: ranks hold consecutive rows.
  if (spec.pieces.size() == 1 && spec.pieces[0].slabs == 1) return flat.view(spec.sizes).to(facade.local.device());
  auto out = at::empty_like(flat);
  int64_t base = 0;
  for (size_t i = 0; i < spec.pieces.size(); ++i) {
    const int64_t units = spec.pieces[i].units();
    const auto array = out.narrow(0, base, units);
    layout.for_each_run(
        i, [&](const auto& run) { engine::run_in_array(array, run).copy_(engine::run_in_flat(flat, run)); });
    base += units;
  }
  return out.view(spec.sizes).to(facade.local.device());
}

std::ostream& operator<<(std::ostream& out, const DTensor& tensor) {
  out << "DTensor(";
  if (!tensor.name().empty()) out << "'" << tensor.name() << "', ";
  out << "sizes=" << tensor.sizes() << ", placements=[";
  for (size_t i = 0; i < tensor.placements().size(); ++i) {
    const auto& placement = tensor.placements()[i];
    if (i) out << ", ";
    if (placement.kind == Placement::Kind::kShard) {
      out << "Shard(" << placement.dim << ")";
    } else if (placement.kind == Placement::Kind::kFlat) {
      out << "Flat()";
    } else {
      out << "Replicate()";
    }
  }
  return out << "], mesh=" << tensor.device_mesh() << ", local=\n" << tensor.to_local().detach() << ")";
}

}  // namespace fsdp
