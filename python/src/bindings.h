#pragma once
#include <torch/csrc/utils/pybind.h>

/// What libfsdp._C holds: one function a file.
namespace fsdp::python {

void bind_mesh(py::module_& module);
void bind_group(py::module_& module);

}  // namespace fsdp::python
