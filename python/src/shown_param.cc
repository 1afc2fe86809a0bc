#include "shown_param.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <fsdp/error.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "engine/param_group.h"
#include "errors.h"

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

/// `dtensor._local_tensor`; InvalidArgument naming `name` if it is no DTensor.
py::object local_of(const py::handle& dtensor, const std::string& name) {
  if (!is_dtensor(dtensor)) {
    throw InvalidArgument("libfsdp: '" + name + "' is " + std::string(Py_TYPE(dtensor.ptr())->tp_name) +
                          " where a DTensor that lies as its parameter does was expected");
  }
  return dtensor.attr(names().local_tensor);
}

template <class Fn>
auto in_hook(const ShownParam& param, Fn&& fn) -> decltype(fn()) {
  return noting([&] { return "in a hook of parameter " + param.title(); }, fn);
}

/// What users hold of a sharded parameter, for the engine.
class UserSlot : public engine::Slot {
 public:
  explicit UserSlot(const ShownParam& param) : param_(param) {}

  bool requires_grad() const override { return user().requires_grad(); }

  at::Tensor run_gradient_hooks(at::Tensor gradient) override { return param_.run_hooks(std::move(gradient)); }

  void run_post_accumulate_hooks() override {
    const auto& parameter = user();
    if (!parameter.grad().defined()) return;
    auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter);
    if (hook) in_hook(param_, [&] { (*hook)(parameter); });
  }

 protected:
  const at::Tensor& user() const { return THPVariable_Unpack(param_.user.ptr()); }
  std::string name() const { return param_.engine->name() + ".grad"; }
  [[noreturn]] void refuse_sizes() const {
    throw InvalidArgument("libfsdp: '" + name() +
                          "' has other sizes on this rank than its parameter; set it to None before backward");
  }
  const ShownParam& param_;  // lives as long as the engine's parameter, which owns this
};

class DTensorSlot final : public UserSlot {
 public:
  using UserSlot::UserSlot;

  at::Tensor run_gradient_hooks(at::Tensor gradient) override {
    if (torch::autograd::impl::hooks(user()).empty() || param_.wrapper.is_none()) {
      return UserSlot::run_gradient_hooks(std::move(gradient));
    }
    return through_wrapper("local_gradient", UserSlot::run_gradient_hooks(through_wrapper("gradient", gradient)));
  }

  void accumulate_gradient(const at::Tensor& local) override {
    py::gil_scoped_acquire gil;
    auto& gradient = user().mutable_grad();
    if (gradient.defined()) {
      auto held = py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient));
      const auto placements = param_.spec.attr("placements");
      if (is_dtensor(held) && !held.attr("placements").equal(placements)) {
        // What autograd made of an operator on the DTensor itself (a penalty on the weights) lies as it came.
        held = held.attr("redistribute")(py::none(), placements);
        gradient = THPVariable_Unpack(held.ptr());
      }
      auto rows = THPVariable_Unpack(local_of(held, name()).ptr());
      if (rows.sizes() != local.sizes()) refuse_sizes();
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

 private:
  at::Tensor through_wrapper(const char* method, const at::Tensor& gradient) const {
    py::gil_scoped_acquire gil;
    const auto result = param_.wrapper.attr(method)(py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient)));
    return THPVariable_Unpack(result.ptr());
  }
};

/// An empty slice gets no gradient.
class SliceSlot final : public UserSlot {
 public:
  using UserSlot::UserSlot;

  void accumulate_gradient(const at::Tensor& local) override {
    auto& gradient = user().mutable_grad();
    if (!gradient.defined()) {
      if (local.numel() > 0) gradient = local;
      return;
    }
    if (gradient.sizes() != local.sizes()) refuse_sizes();
    gradient.add_(local);
  }
};

/// A stretch of the group's parameter, whose tensor hooks run on all of it: see Group::set_hooks.
class HiddenSlot final : public UserSlot {
 public:
  using UserSlot::UserSlot;

  at::Tensor run_gradient_hooks(at::Tensor gradient) override { return gradient; }

  void accumulate_gradient(const at::Tensor& local) override {
    auto& gradient = user().mutable_grad();
    if (!gradient.defined()) gradient = at::zeros(user().sizes(), local.options());
    if (gradient.sizes() != user().sizes()) refuse_sizes();
    gradient.narrow(0, param_.offset, local.numel()).add_(local);
    *param_.reduced = true;
  }

  void run_post_accumulate_hooks() override {
    if (std::exchange(*param_.reduced, false)) UserSlot::run_post_accumulate_hooks();
  }
};

/// All shards of the group that `shard` is one of, one after another.
at::Tensor line_of(const at::Tensor& shard) {
  at::AutoDispatchBelowADInplaceOrView plain;
  const auto length = static_cast<int64_t>(shard.storage().nbytes()) / shard.element_size();
  return at::empty({0}, shard.options()).set_(shard.storage(), 0, {length}, {1});
}

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

std::unique_ptr<engine::Slot> ShownParam::make_slot() const {
  if (kind == Kind::kDTensor) return std::make_unique<DTensorSlot>(*this);
  if (kind == Kind::kSlice) return std::make_unique<SliceSlot>(*this);
  return std::make_unique<HiddenSlot>(*this);
}

at::Tensor ShownParam::run_hooks(at::Tensor gradient) const {
  const auto& hooks = torch::autograd::impl::hooks(THPVariable_Unpack(user.ptr()));
  if (hooks.empty()) return gradient;
  return in_hook(*this, [&] {
    for (const auto& hook : hooks) gradient = (*hook)({gradient})[0];
    return gradient;
  });
}

std::string ShownParam::title() const {
  const auto name = kind == Kind::kHidden ? std::string("(flat)") : "'" + engine->name() + "'";
  return name + " of group '" + engine->group().name() + "'";
}

void ShownParam::attach(engine::ShardedParam& param) {
  engine = &param;
  local = py::reinterpret_steal<py::object>(THPVariable_Wrap(param.shard()));
  whole = py::reinterpret_steal<py::object>(THPVariable_Wrap(param.leaf()));
}

/// From now on `tensor` counts writes as `other` does.
static void share_version(const at::Tensor& tensor, const at::Tensor& other) {
  tensor.unsafeGetTensorImpl()->set_version_counter(other.unsafeGetTensorImpl()->version_counter());
}

void ShownParam::set_user(py::object parameter) {
  user = std::move(parameter);
  engine->set_slot(make_slot());
  const auto& tensor = THPVariable_Unpack(user.ptr());
  const auto& shard = engine->shard();
  if (kind == Kind::kDTensor) {
    user.attr(names().local_tensor) = local;
    spec = user.attr("_spec");
  } else {
    tensor.set_data(kind == Kind::kSlice ? shard : line_of(shard));
  }
  if (kind == Kind::kHidden) {
    // One counter for all: a write on the group's parameter is one on each of them.
    share_version(shard, tensor);
    share_version(engine->leaf(), tensor);
    show(whole);
    return;
  }
  // Operators on a DTensor count a write on it alone. Shard and leaf must see it (note: one version counter).
  share_version(tensor, shard);
  py::setattr(whole, "__class__", names().parameter);
  show(user);
}

void ShownParam::show(const py::object& value) const {
  for (const auto& place : places) place.set(value);
}

void ShownParam::show_sharded() const {
  if (kind != Kind::kHidden) show(user);
}

void ShownParam::show_whole() const {
  if (kind == Kind::kHidden) return;
  if (wrapper.is_none()) return show(whole);
  // Part of the graph whatever the mode is now: a module may be left and entered while its group stays unsharded.
  c10::InferenceMode tracked(false);
  at::AutoGradMode recording(true);
  const auto shown = wrapper.attr("show")(whole);
  if (shown.is_none()) return show(user);  // never gathered yet
  share_version(THPVariable_Unpack(shown.ptr()), engine->shard());
  show(shown);
}

bool ShownParam::unchanged() const {
  if (kind == Kind::kHidden) {
    if (holder.get() != user.ptr()) return false;
  } else {
    for (const auto& place : places) {
      if (place.get() != user.ptr()) return false;
    }
  }
  if (kind != Kind::kDTensor) {
    const auto& shard = engine->shard();
    const auto& now = THPVariable_Unpack(user.ptr());
    return now.storage().is_alias_of(shard.storage()) && now.scalar_type() == shard.scalar_type() &&
           lies_like_user(user);
  }
  const auto now = py::reinterpret_steal<py::object>(PyObject_GetAttr(user.ptr(), names().local_tensor.ptr()));
  if (!now) throw py::error_already_set();
  return now.is(local);
}

py::object ShownParam::replacement() const {
  const auto& name = engine->name();
  py::object found = user;
  const auto look = [&](const Place& place) {
    auto* now = place.get();
    if (!now || now == Py_None) {
      throw InvalidArgument("libfsdp: parameter '" + name + "' was removed from its module after it was sharded");
    }
    if (found.is(user)) found = py::reinterpret_borrow<py::object>(now);
  };
  if (kind == Kind::kHidden) {
    look(holder);
  } else {
    for (const auto& place : places) look(place);
  }
  if (!lies_like_user(found)) {
    throw InvalidArgument("libfsdp: parameter '" + name + "' was replaced after it was sharded by " +
                          (is_dtensor(found) ? "a DTensor of another shape, mesh or placement: " +
                                                   py::str(found.attr("_spec")).cast<std::string>()
                                             : "a tensor of " + c10::str(THPVariable_Unpack(found.ptr()).sizes())) +
                          " where " +
                          (kind == Kind::kDTensor ? py::str(spec).cast<std::string>()
                                                  : c10::str(THPVariable_Unpack(user.ptr()).sizes())) +
                          " was expected");
  }
  return found;
}

bool ShownParam::lies_like_user(const py::object& parameter) const {
  if (kind != Kind::kDTensor) {
    const auto& tensor = THPVariable_Unpack(parameter.ptr());
    const auto length = kind == Kind::kSlice ? engine->shard().numel() : line_of(engine->shard()).numel();
    return !is_dtensor(parameter) && tensor.dim() == 1 && tensor.numel() == length && tensor.is_contiguous();
  }
  const auto held = held_of(parameter);
  const auto its = parameter.attr("_spec");
  return its.attr("mesh").equal(spec.attr("mesh")) && its.attr("placements").equal(spec.attr("placements")) &&
         parameter.attr("shape").equal(user.attr("shape")) && held.sizes() == engine->shard().sizes();
}

at::Tensor ShownParam::held_of(const py::object& parameter) const {
  if (kind == Kind::kDTensor) return THPVariable_Unpack(local_of(parameter, engine->name()).ptr());
  auto data = THPVariable_Unpack(parameter.ptr()).detach();
  return kind == Kind::kSlice ? data : data.narrow(0, offset, engine->shard().numel());
}

bool is_dtensor(const py::handle& object) { return py::isinstance(object, names().dtensor); }

}  // namespace fsdp::python
