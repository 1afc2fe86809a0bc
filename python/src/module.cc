#include <fsdp/version.h>

#include "bindings.h"
#include "errors.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "The engine of libfsdp. Private to the package.";
  // Functions and not attributes: stubs would repeat the values of those.
  module.def("version", [] { return FSDP_VERSION; });
  module.def(
      "torch_version", [] { return FSDP_PYTHON_TORCH_VERSION; }, "Of the torch that this was built for.");
  fsdp::python::bind_errors(module);
  fsdp::python::bind_mesh(module);
  fsdp::python::bind_group(module);
}
