#include "extension.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/InferenceMode.h>

#include "errors.h"

namespace fsdp::python {
namespace {

/// A gather may begin and end within an operator, in any mode and below keys. Python code is run as if it were not.
struct Outside {
  py::gil_scoped_acquire gil;
  c10::InferenceMode normal{false};
  at::NoGradGuard no_grad;
  c10::impl::ForceDispatchKeyGuard keys{c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{})};
};

}  // namespace

PyExtension::~PyExtension() {
  py::gil_scoped_acquire gil;
  impl_ = py::object();
}

std::vector<at::Tensor> PyExtension::send() {
  Outside outside;
  return noting([this] { return "in fsdp_pre_all_gather of parameter " + param_.title(); },
                [this] { return impl_.attr("send")(param_.local).cast<std::vector<at::Tensor>>(); });
}

void PyExtension::receive(const std::vector<at::Tensor>& received) {
  Outside outside;
  noting([this] { return "in fsdp_post_all_gather of parameter " + param_.title(); },
         [&] { impl_.attr("receive")(param_.local, received); });
}

void PyExtension::release() noexcept {
  Outside outside;
  try {
    impl_.attr("release")();
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("libfsdp: freeing what an extension made");
  }
}

}  // namespace fsdp::python
