#include "errors.h"

#include <c10/util/Exception.h>
#include <fsdp/error.h>
#include <torch/csrc/Exceptions.h>

namespace fsdp::python {
namespace {

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

}  // namespace fsdp::python
