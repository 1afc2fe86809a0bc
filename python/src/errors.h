#pragma once
#include <string>

#include <torch/csrc/utils/pybind.h>

namespace fsdp::python {

/// fsdp's errors, and those of torch and Python that pass through C++, as the Python exceptions that torch raises for
/// the same mistake.
void bind_errors(py::module_& module);

/// What the code around this call is handling just now (sys.exc_info()[1]): a borrowed reference, null outside an
/// `except` block. A hook that runs because a forward threw sees that forward's exception.
PyObject* handled_exception();

std::string text_of(PyObject* object) noexcept;

}  // namespace fsdp::python
