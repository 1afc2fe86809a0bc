#include "errors.h"

#include <c10/util/Exception.h>
#include <fsdp/error.h>
#include <torch/csrc/Exceptions.h>

namespace fsdp::python {
namespace {

const std::string kNote = "libfsdp: ";

void translate(std::exception_ptr pointer) {
  try {
    std::rethrow_exception(std::move(pointer));
  } catch (python_error& error) {
    error.restore();
  } catch (const InvalidArgument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const NotSupported& error) {
    PyErr_SetString(PyExc_NotImplementedError, error.what());
  } catch (const CommError& error) {  // TimeoutError too
    PyErr_SetString(py::module_::import("torch.distributed").attr("DistBackendError").ptr(), error.what());
  } catch (const Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  }
}

}  // namespace

void bind_errors(py::module_& module) { py::register_local_exception_translator(&translate); }

PyObject* handled_exception() {
  PyObject *type, *value, *trace;
  PyErr_GetExcInfo(&type, &value, &trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  Py_XDECREF(value);  // whoever handles it holds it
  return value == Py_None ? nullptr : value;
}

std::string text_of(PyObject* object) noexcept {
  try {
    return std::string(Py_TYPE(object)->tp_name) + ": " + py::str(py::handle(object)).cast<std::string>();
  } catch (...) {
    return "an exception that cannot be printed";
  }
}

void add_note(PyObject* error, const std::string& where) noexcept {
  if (!error) return;
  py::gil_scoped_acquire gil;
  const py::error_scope kept;
  try {
    const py::handle exception(error);
    for (const auto& note : py::getattr(exception, "__notes__", py::tuple())) {
      if (py::str(note).cast<std::string>().rfind(kNote, 0) == 0) return;
    }
    exception.attr("add_note")(kNote + where);
  } catch (...) {  // an exception that takes no notes stays without one
  }
}

void add_note(python_error& error, const std::string& where) noexcept {
  if (error.type) return add_note(error.value, where);
  py::gil_scoped_acquire gil;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  add_note(value, where);
  PyErr_Restore(type, value, trace);
}

}  // namespace fsdp::python
