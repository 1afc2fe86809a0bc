#include "shown_param.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <fsdp/error.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

namespace fsdp::python {
namespace {

/// Looked up once in a process: Python objects that live as long as torch does.
struct Names {
  py::object dtensor = py::module_::import("torch.distributed.tensor").attr("DTensor");
  py::object make_dtensor = py::module_::import("torch").attr("Tensor").attr("_dtensor__new__");
  py::object parameter = py::module_::import("torch.nn").attr("Parameter");
  py::str local_tensor = py::reinterpret_steal<py::str>(PyUnicode_InternFromString("_local_tensor"));
  py::dict plain = [] {
    py::dict keywords;
    keywords["requires_grad"] = false;
    return keywords;
  }();
};

const Names& names() {
  static const auto* instance = new Names;  // never destroyed: the interpreter may be gone by then
  return *instance;
}

/// A sharded parameter's DTensor, for the engine.
class DTensorSlot : public engine::Slot {
 public:
  explicit DTensorSlot(const ShownParam& param) : param_(param) {}

  bool requires_grad() const override { return user().requires_grad(); }

  at::Tensor run_gradient_hooks(at::Tensor gradient) override {
    const auto& hooks = torch::autograd::impl::hooks(user());
    if (hooks.empty()) return gradient;
    const bool wrapped = !param_.wrapper.is_none();
    if (wrapped) gradient = through_wrapper("gradient", gradient);
    for (const auto& hook : hooks) gradient = (*hook)({gradient})[0];
    return wrapped ? through_wrapper("local_gradient", gradient) : gradient;
  }

  void accumulate_gradient(const at::Tensor& local) override {
    py::gil_scoped_acquire gil;
    auto& gradient = user().mutable_grad();
    if (gradient.defined()) {
      auto held = py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient));
      const auto name = param_.engine->name() + ".grad";
      const auto placements = param_.spec.attr("placements");
      if (is_dtensor(held) && !held.attr("placements").equal(placements)) {
        // What autograd made of an operator on the DTensor itself (a penalty on the weights) lies as it came.
        held = held.attr("redistribute")(py::none(), placements);
        gradient = THPVariable_Unpack(held.ptr());
      }
      auto rows = THPVariable_Unpack(local_of(held, name).ptr());
      if (rows.sizes() != local.sizes()) {
        throw InvalidArgument("libfsdp: '" + name +
                              "' has other sizes on this rank than its parameter; set it "
                              "to None before backward");
      }
      rows.add_(local);
      return;
    }
    const auto rows = py::reinterpret_steal<py::object>(THPVariable_Wrap(local));
    const auto made = py::make_tuple(names().dtensor, rows, param_.spec);
    const auto wrapped =
        py::reinterpret_steal<py::object>(PyObject_Call(names().make_dtensor.ptr(), made.ptr(), names().plain.ptr()));
    if (!wrapped) throw py::error_already_set();
    gradient = THPVariable_Unpack(wrapped.ptr());
  }

  void run_post_accumulate_hooks() override {
    const auto& parameter = user();
    if (auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter)) (*hook)(parameter);
  }

 private:
  at::Tensor through_wrapper(const char* method, const at::Tensor& gradient) const {
    py::gil_scoped_acquire gil;
    const auto result = param_.wrapper.attr(method)(py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient)));
    return THPVariable_Unpack(result.ptr());
  }

  const at::Tensor& user() const { return THPVariable_Unpack(param_.user.ptr()); }
  const ShownParam& param_;  // lives as long as the engine's parameter, which owns this
};

}  // namespace

PyObject* Place::get() const {
  auto* found = PyDict_GetItemWithError(table.ptr(), name.ptr());
  if (!found && PyErr_Occurred()) throw py::error_already_set();
  return found;
}

void Place::set(const py::object& value) const {
  if (!follower.is_none()) {
    const auto module = follower();
    if (!module.is_none()) {
      py::setattr(module, name, value);
      return;
    }
  }
  if (PyDict_SetItem(table.ptr(), name.ptr(), value.ptr()) != 0) throw py::error_already_set();
}

void ShownParam::attach(engine::ShardedParam& param) {
  engine = &param;
  local = py::reinterpret_steal<py::object>(THPVariable_Wrap(param.shard()));
  whole = py::reinterpret_steal<py::object>(THPVariable_Wrap(param.leaf()));
  py::setattr(whole, "__class__", names().parameter);
  param.set_slot(std::make_unique<DTensorSlot>(*this));
}

/// From now on `shown` counts writes as the shard does.
static void share_version(const py::object& shown, const engine::ShardedParam& param) {
  const auto& counter = param.shard().unsafeGetTensorImpl()->version_counter();
  THPVariable_Unpack(shown.ptr()).unsafeGetTensorImpl()->set_version_counter(counter);
}

void ShownParam::set_user(py::object parameter) {
  user = std::move(parameter);
  user.attr(names().local_tensor) = local;
  // Operators on a DTensor count a write on it alone. Shard and leaf must see it (note: one version counter).
  share_version(user, *engine);
  spec = user.attr("_spec");
  show(user);
}

void ShownParam::show(const py::object& value) const {
  for (const auto& place : places) place.set(value);
}

void ShownParam::show_whole() const {
  if (wrapper.is_none()) return show(whole);
  // Part of the graph whatever the mode is now: a module may be left and entered while its group stays unsharded.
  c10::InferenceMode tracked(false);
  at::AutoGradMode recording(true);
  const auto shown = wrapper.attr("show")(whole);
  if (shown.is_none()) return show(user);  // never gathered yet
  share_version(shown, *engine);
  show(shown);
}

bool ShownParam::unchanged() const {
  for (const auto& place : places) {
    if (place.get() != user.ptr()) return false;
  }
  const auto now = py::reinterpret_steal<py::object>(PyObject_GetAttr(user.ptr(), names().local_tensor.ptr()));
  if (!now) throw py::error_already_set();
  return now.is(local);
}

bool is_dtensor(const py::handle& object) { return py::isinstance(object, names().dtensor); }

py::object local_of(const py::handle& dtensor, const std::string& name) {
  if (!is_dtensor(dtensor)) {
    throw InvalidArgument("libfsdp: '" + name + "' is " + std::string(Py_TYPE(dtensor.ptr())->tp_name) +
                          " where a DTensor that lies as its parameter does was expected");
  }
  return dtensor.attr(names().local_tensor);
}

}  // namespace fsdp::python
