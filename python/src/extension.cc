#include "extension.h"

#include "engine/user_code.h"
#include "errors.h"

namespace fsdp::python {
namespace {

struct PythonCode {
  py::gil_scoped_acquire gil;
  engine::UserCode as_user;
};

}  // namespace

PyExtension::~PyExtension() {
  py::gil_scoped_acquire gil;
  impl_ = py::object();
}

std::vector<at::Tensor> PyExtension::send() {
  PythonCode python;
  return noting([this] { return "in fsdp_pre_all_gather of parameter " + param_.title(); },
                [this] { return impl_.attr("send")(param_.local).cast<std::vector<at::Tensor>>(); });
}

void PyExtension::receive(const std::vector<at::Tensor>& received) {
  PythonCode python;
  noting([this] { return "in fsdp_post_all_gather of parameter " + param_.title(); },
         [&] { impl_.attr("receive")(param_.local, received); });
}

void PyExtension::release() noexcept {
  PythonCode python;
  try {
    impl_.attr("release")();
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("libfsdp: freeing what an extension made");
  }
}

}  // namespace fsdp::python
