#include <fsdp/dtensor.h>

#include <ostream>
#include <sstream>

#include <ATen/core/Formatting.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <fsdp/error.h>

#include "engine/run_views.h"
#include "tensor/facade.h"

namespace fsdp {

namespace {
const tensor::FacadeTag& tag(const at::Tensor& t) { return *tensor::facade_of(t); }
}  // namespace

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
  const auto mine = facade.local.detach().contiguous().view({-1});
  auto flat = at::empty({layout.segments().total()}, mine.options());
  channel->all_gather(flat, mine, layout.segments())->wait();
  // One slab is whole once gathered: ranks hold consecutive rows.
  if (spec.pieces.size() == 1 && spec.pieces[0].slabs == 1) return flat.view(spec.sizes);
  auto out = at::empty_like(flat);
  int64_t base = 0;
  for (size_t i = 0; i < spec.pieces.size(); ++i) {
    const int64_t units = spec.pieces[i].units();
    const auto array = out.narrow(0, base, units);
    layout.for_each_run(
        i, [&](const auto& run) { engine::run_in_array(array, run).copy_(engine::run_in_flat(flat, run)); });
    base += units;
  }
  return out.view(spec.sizes);
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
    } else {
      out << "Replicate()";
    }
  }
  return out << "], mesh=" << tensor.device_mesh() << ", local=\n" << tensor.to_local().detach() << ")";
}

}  // namespace fsdp
