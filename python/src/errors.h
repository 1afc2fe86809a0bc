#pragma once
#include <string>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

namespace fsdp::python {

/// fsdp's errors, and those of torch and Python that pass through C++, as the Python exceptions that torch raises for
/// the same mistake.
void bind_errors(py::module_& module);

/// What the code around this call is handling just now (sys.exc_info()[1]): a borrowed reference, null outside an
/// `except` block. A hook that runs because a forward threw sees that forward's exception.
PyObject* handled_exception();

std::string text_of(PyObject* object) noexcept;

/// Says on the exception `error` where it was raised (BaseException.add_note, PEP 678), unless libfsdp has done so: the
/// innermost place stays. Never throws; leaves Python's error indicator as it was.
void add_note(PyObject* error, const std::string& where) noexcept;

/// As above on the Python exception that is being thrown, which torch keeps in the indicator or in `error`.
void add_note(python_error& error, const std::string& where) noexcept;

/// Runs code of the user's. An exception of Python's leaves it as it is, with the note `where()` added.
template <class Where, class Fn>
auto noting(Where&& where, Fn&& fn) -> decltype(fn()) {
  try {
    return fn();
  } catch (python_error& error) {
    add_note(error, where());
    throw;
  } catch (py::error_already_set& error) {
    py::gil_scoped_acquire gil;
    add_note(error.value().ptr(), where());
    throw;
  }
}

}  // namespace fsdp::python
