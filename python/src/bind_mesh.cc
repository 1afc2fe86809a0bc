#include <chrono>

#include <fsdp/device_mesh.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings.h"
#include "comm/channel.h"
#include "mesh/mesh_state.h"
#include "mesh/world.h"
#include "module/same_model.h"

namespace fsdp::python {
namespace {

std::shared_ptr<mesh::World> make_world(const std::string& engine, c10::intrusive_ptr<c10d::Store> store, int rank,
                                        int size, double timeout_seconds) {
  const auto timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_seconds * 1000));
  return std::make_shared<mesh::World>(engine, std::move(store), rank, size, /*local_rank=*/0, timeout);
}

DeviceMesh make_mesh(const std::shared_ptr<mesh::World>& world, const c10::Device& device,
                     const std::vector<int64_t>& shape, const std::vector<std::string>& names,
                     const std::vector<int>& ranks) {
  return DeviceMesh(std::make_shared<mesh::MeshState>(world, device.type(), shape, names, ranks));
}

}  // namespace

void bind_mesh(py::module_& module) {
  module.def("engines", &comm::engines, "Names of the engines that this build knows.");
  py::class_<DeviceMesh>(module, "Mesh", "Ranks arranged in axes, and the channels among them.")
      .def_property_readonly("size", &DeviceMesh::size)
      .def(
          "require_same",
          [](const DeviceMesh& mesh, const std::string& subject, const std::vector<std::string>& lines) {
            module::require_same_on_all_ranks(mesh, subject, lines, "");
          },
          py::arg("subject"), py::arg("lines"), py::call_guard<py::gil_scoped_release>(),
          "Compares `lines` over the ranks of the mesh; ValueError on all of them where two differ. Collective.");
  py::class_<mesh::World, std::shared_ptr<mesh::World>>(module, "World", "The ranks of a process group.")
      .def(py::init(&make_world), py::arg("engine"), py::arg("store"), py::arg("rank"), py::arg("size"),
           py::arg("timeout_seconds"))
      .def("mesh", &make_mesh, py::arg("device"), py::arg("shape"), py::arg("names"), py::arg("ranks"),
           "A mesh over `ranks` (row-major), this one included. Channels are opened on first use and shared by what "
           "is sharded on the mesh.");
}

}  // namespace fsdp::python
