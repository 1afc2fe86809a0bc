#include "custom.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include "errors.h"

namespace fsdp::python {
namespace {

/// An object that may be copied and dropped by a thread without the GIL.
using Held = std::shared_ptr<py::object>;

Held hold(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            py::gil_scoped_acquire gil;
            delete held;
          }};
}

py::object wrapped(const at::Tensor& tensor) { return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)); }

/// What both collectives have of torch's interface `Comm`.
struct Comm {
  Held comm, group;
  Where where;

  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) const {
    py::gil_scoped_acquire gil;
    const auto dtype = c10::typeMetaToScalarType(options.dtype());
    return noting(where, [&] {
      return comm
          ->attr("allocate")(py::make_tuple(numel), py::arg("dtype") = dtype, py::arg("device") = options.device())
          .cast<at::Tensor>();
    });
  }

  template <class... More>
  WaitFn run(const at::Tensor& output, const at::Tensor& input, More&&... more) const {
    py::gil_scoped_acquire gil;
    auto work = noting(where, [&] {
      return (*comm)(py::arg("output_tensor") = wrapped(output), py::arg("input_tensor") = wrapped(input),
                     py::arg("group") = *group, std::forward<More>(more)..., py::arg("async_op") = true);
    });
    if (work.is_none()) return {};
    return [held = hold(std::move(work)), place = where] {
      py::gil_scoped_acquire waiting;
      noting(place, [&] { held->attr("wait")(); });
    };
  }
};

class PythonAllGather final : public CustomAllGather {
 public:
  explicit PythonAllGather(Comm comm) : comm_(std::move(comm)) {}
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    return comm_.allocate(numel, options);
  }
  WaitFn run(const at::Tensor& output, const at::Tensor& input) override { return comm_.run(output, input); }

 private:
  Comm comm_;
};

class PythonReduceScatter final : public CustomReduceScatter {
 public:
  explicit PythonReduceScatter(Comm comm) : comm_(std::move(comm)) {}
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    return comm_.allocate(numel, options);
  }
  WaitFn run(const at::Tensor& output, const at::Tensor& input) override {
    py::gil_scoped_acquire gil;
    const auto sum = py::module_::import("torch.distributed").attr("ReduceOp").attr("SUM");
    return comm_.run(output, input, py::arg("op") = sum);
  }

 private:
  Comm comm_;
};

}  // namespace

std::shared_ptr<CustomAllGather> custom_all_gather(py::object comm, py::object group, Where where) {
  if (comm.is_none()) return nullptr;
  return std::make_shared<PythonAllGather>(Comm{hold(std::move(comm)), hold(std::move(group)), std::move(where)});
}

std::shared_ptr<CustomReduceScatter> custom_reduce_scatter(py::object comm, py::object group, Where where) {
  if (comm.is_none()) return nullptr;
  return std::make_shared<PythonReduceScatter>(Comm{hold(std::move(comm)), hold(std::move(group)), std::move(where)});
}

std::function<void(const at::Tensor&)> tensor_hook(py::object hook, Where where) {
  if (hook.is_none()) return {};
  return [held = hold(std::move(hook)), place = std::move(where)](const at::Tensor& tensor) {
    py::gil_scoped_acquire gil;
    noting(place, [&] { (*held)(wrapped(tensor)); });
  };
}

}  // namespace fsdp::python
