#include <fsdp/version.h>

#include "bindings.h"
#include "errors.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "The engine of libfsdp. Private to the package.";
  module.attr("version") = FSDP_VERSION;
  module.attr("torch_version") = FSDP_PYTHON_TORCH_VERSION;
  fsdp::python::bind_errors(module);
  fsdp::python::bind_mesh(module);
  fsdp::python::bind_group(module);
}
