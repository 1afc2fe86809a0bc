#include "group.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <fsdp/error.h>

#include "errors.h"
#include "extension.h"

namespace fsdp::python {
namespace {

template <class Fn>
void without_gil(Fn&& fn) {
  py::gil_scoped_release release;
  fn();
}

}  // namespace

Group::Group(std::vector<std::string> names, std::vector<at::Tensor> params, std::vector<int64_t> dims,
             const DeviceMesh& mesh, const engine::DtypePolicy& policy, engine::Layout layout,
             std::optional<engine::Offload> offload)
    : names_(std::move(names)), dims_(std::move(dims)), policy_(policy), layout_(layout), offload_(offload) {
  for (size_t i = 0; i < names_.size(); ++i) params_.push_back(std::make_unique<ShownParam>());
  std::vector<engine::NamedParam> named;
  for (auto& param : params) named.push_back({{}, std::move(param)});
  without_gil([&] { group_ = make_engine(std::move(named), mesh); });
  attach();
}

Group::~Group() {
  // Gathers that nobody wanted are waited for here.
  without_gil([&] { group_.reset(); });
}

std::unique_ptr<engine::ParamGroup> Group::make_engine(std::vector<engine::NamedParam> params, const DeviceMesh& mesh) {
  for (size_t i = 0; i < names_.size(); ++i) params[i].name = names_[i], params[i].dim = dims_[i];
  return std::make_unique<engine::ParamGroup>("(root)", params, mesh, policy_, layout_, offload_);
}

void Group::attach() {
  group_->face = this;
  for (const auto& param : group_->params()) {
    const auto at = std::find(names_.begin(), names_.end(), param->name());
    params_[static_cast<size_t>(at - names_.begin())]->attach(*param);
  }
}

void Group::place(size_t i, py::object user, std::vector<Place> places, py::object wrapper) {
  auto& param = *params_.at(i);
  param.kind = is_dtensor(user) ? ShownParam::Kind::kDTensor : ShownParam::Kind::kSlice;
  param.places = std::move(places);
  param.wrapper = std::move(wrapper);
  param.set_user(std::move(user));
}

void Group::extend(size_t i, py::object impl, const std::vector<at::Tensor>& like) {
  auto& param = *params_.at(i);
  auto extension = std::make_shared<PyExtension>(param, impl);
  without_gil([&] { group_->set_extension(*param.engine, std::move(extension), like); });
  param.wrapper = std::move(impl);
}

void Group::hide(size_t i, py::object flat, int64_t offset, Place holder, std::vector<Place> places) {
  auto& param = *params_.at(i);
  param.kind = ShownParam::Kind::kHidden;
  param.offset = offset;
  param.holder = std::move(holder);
  param.places = std::move(places);
  param.reduced = flat_reduced_;
  param.set_user(std::move(flat));
  set_hooks();
}

void Group::set_name(const std::string& name, const std::vector<std::string>& params) {
  group_->set_name(name.empty() ? "(root)" : name);
  for (size_t i = 0; i < params_.size(); ++i) params_[i]->engine->set_name(params.at(i));
}

void Group::note_config_change() {
  if (group_->shared_context()) group_->context().note_config_change();
}

void Group::keep_over(int64_t ranks) {
  without_gil([&] { group_->keep_over(ranks); });
  note_config_change();
}

void Group::set_custom_gather(std::shared_ptr<CustomAllGather> gather) {
  without_gil([&] { group_->set_custom_gather(gather); });
  custom_gather_ = std::move(gather);
  note_config_change();
}

void Group::set_custom_reduce(std::shared_ptr<CustomReduceScatter> reduce) {
  custom_reduce_ = std::move(reduce);
  without_gil([&] { group_->set_custom_reduce(custom_reduce_); });
  note_config_change();
}

void Group::set_all_reduce_hook(std::function<void(const at::Tensor&)> hook, std::optional<c10::Stream> stream) {
  all_reduce_hook_ = std::move(hook);
  hook_stream_ = stream;
  set_hooks();
  note_config_change();
}

void Group::set_custom_all_reduce(std::function<void(const at::Tensor&)> reduce) {
  custom_all_reduce_ = std::move(reduce);
  set_hooks();
  note_config_change();
}

void Group::set_hooks() {
  group_->set_all_reduce_hook(all_reduce_hook_, hook_stream_);
  if (custom_all_reduce_) group_->set_custom_all_reduce(custom_all_reduce_);
  if (params_.empty() || params_[0]->kind != ShownParam::Kind::kHidden) return;
  group_->set_gradient_hook([&param = *params_[0]](const at::Tensor& line) { return param.run_hooks(line); });
}

void Group::share_memory() {
  without_gil([&] { group_->share_memory(); });
  in_place_ = true;
  note_config_change();
}

std::vector<std::string> Group::parameter_names() const {
  std::vector<std::string> names;
  for (const auto& param : params_) names.push_back(param->engine->name());
  return names;
}

// --- forward --------------------------------------------------------------------------------------------------------

void Group::adopt_all() {
  for (auto* each : group_->context().groups()) {
    if (!each || of(*each).adopt()) continue;
    throw InvalidArgument("libfsdp: parameters of group '" + each->name() +
                          "' were given another dtype or device behind its back; call to(), half(), to_empty() and the "
                          "like on the module that fully_shard was applied to, or on the whole model");
  }
}

void Group::enter() {
  if (uses_++ > 0) return;
  try {
    auto& context = group_->context();
    const bool outermost = !context.whole_here();
    if (outermost) {
      adopt_all();
      context.free_what_may_be_old();
    }
    for (auto& param : params_) param->engine->sync_requires_grad();
    // Of several modules that make one group, only one that is called by itself is a forward of its own. Inside
    // another forward their end closes nothing: the next touch of another group does.
    entered_ = !several_ || outermost;
    without_gil([&] {
      if (entered_) context.enter_forward(*group_);
      if (params_.empty()) return;
      try {
        context.need(*group_);
        // Operators that read what an extension made of a parameter are not seen.
        for (const auto& param : group_->params()) {
          if (param->extension()) context.touch(*param);
        }
      } catch (const std::exception& error) {
        if (entered_) context.fail_forward(*group_, error.what());
        throw;
      }
    });
    handled_ = handled_exception();
    show_whole();
  } catch (...) {
    uses_ = 0;
    throw;
  }
}

Group::Left Group::leave() {
  if (idle()) return Left::kNested;
  auto* error = handled_exception();
  const bool failed = error && error != handled_;
  if (failed) add_note(error, "in the forward of group '" + group_->name() + "'");
  if (--uses_ > 0) return failed ? Left::kFailed : Left::kNested;
  show_sharded();
  if (std::exchange(entered_, false)) {
    if (failed) {
      const auto what = text_of(error);
      without_gil([&] { group_->context().fail_forward(*group_, what); });
    } else {
      without_gil([&] { group_->context().leave_forward(*group_); });
    }
  }
  return failed ? Left::kFailed : Left::kEnded;
}

void Group::show_whole() {
  for (auto& param : params_) {
    // What a wrapper made earlier may be of another graph, or of a leaf that was frozen.
    if (!whole_ || !param->wrapper.is_none()) param->show_whole();
  }
  whole_ = true;
}

void Group::show_sharded() {
  if (!whole_ || !idle() || in_backward_) return;
  for (auto& param : params_) param->show_sharded();
  whole_ = false;
}

// --- by hand --------------------------------------------------------------------------------------------------------

void Group::unshard(bool wait) {
  if (params_.empty()) return;
  if (!group_->context().whole_here()) {
    adopt_all();
    group_->context().free_what_may_be_old();
  }
  for (auto& param : params_) param->engine->sync_requires_grad();
  without_gil([&] { group_->context().unshard(*group_, wait); });
  if (wait) show_whole();
}

void Group::reshard() {
  without_gil([&] { group_->context().reshard(*group_); });
  show_sharded();
}

void Group::reset() {
  without_gil([&] { group_->context().reset(); });
  for (auto* each : group_->context().groups()) {
    if (!each) continue;
    auto& group = of(*each);
    group.uses_ = 0;
    group.entered_ = group.in_backward_ = false;
    group.show_sharded();
  }
}

// --- what the user replaced -----------------------------------------------------------------------------------------

bool Group::adopt() {
  if (lent || !idle() || whole_) return true;
  std::vector<std::pair<ShownParam*, py::object>> changed;
  for (auto& param : params_) {
    if (param->unchanged()) continue;
    auto found = param->replacement();
    const auto& shard = param->engine->shard();
    const auto local = param->held_of(found);
    if (local.scalar_type() != shard.scalar_type() || local.device() != shard.device()) return false;
    changed.emplace_back(param.get(), std::move(found));
  }
  at::NoGradGuard no_grad;
  for (auto& [param, found] : changed) {
    const auto local = param->held_of(found);
    if (!local.is_same(param->engine->shard())) param->engine->shard().copy_(local);
  }
  for (auto& [param, found] : changed) param->set_user(found);
  return true;
}

void Group::rebuild() {
  if (!adopt()) remake();
}

void Group::set_policy(const engine::DtypePolicy& policy) {
  if (policy == policy_) return;
  if (busy() || lent) {
    throw InvalidArgument("libfsdp: group '" + group_->name() +
                          "' cannot get other dtypes inside a forward or backward");
  }
  show_sharded();
  policy_ = policy;
  remake();
}

void Group::remake() {
  if (group_->holds_gradients()) {
    throw InvalidArgument("libfsdp: group '" + group_->name() +
                          "' has gradients that are not reduced yet and would be lost with its dtypes or device: let a "
                          "backward with gradient sync reduce them first");
  }
  at::NoGradGuard no_grad;
  std::vector<py::object> users;
  std::vector<at::Tensor> locals;
  std::vector<engine::NamedParam> stand_ins;
  for (auto& param : params_) {
    users.push_back(param->replacement());
    locals.push_back(param->held_of(users.back()));
    // Sizes, dtype and device for the new group, and no bytes: the rows are copied below, or kept.
    const auto whole = at::zeros({1}, locals.back().options()).expand(param->engine->sizes());
    stand_ins.push_back({{}, whole, 0, locals.back()});
    if (!locals.back().key_set().has(c10::DispatchKey::Python)) stand_ins.back().shard.reset();
  }
  const auto shown = parameter_names();
  auto old = std::move(group_);
  for (const auto& param : old->params()) param->tag()->replaced = param->name();
  without_gil([&] { group_ = make_engine(std::move(stand_ins), old->mesh()); });
  attach();
  set_name(old->name(), shown);
  group_->flags() = old->flags();
  without_gil([&] {
    group_->keep_over(old->kept_over());
    if (custom_gather_) group_->set_custom_gather(custom_gather_);
    if (custom_reduce_) group_->set_custom_reduce(custom_reduce_);
    if (in_place_) group_->share_memory();
  });
  for (size_t i = 0; i < params_.size(); ++i) {
    auto& param = *params_[i];
    if (!param.engine->shard().is_same(locals[i])) param.engine->shard().copy_(locals[i]);
    param.set_user(users[i]);
  }
  set_hooks();
  if (!old->shared_context()) return;
  auto groups = old->context().groups();
  groups.erase(std::remove(groups.begin(), groups.end(), nullptr), groups.end());
  group_->place.parent = old->place.parent;
  group_->place.leader = old->place.leader == old.get() ? group_.get() : old->place.leader;
  for (auto*& each : groups) {
    if (each == old.get()) each = group_.get();
    if (each->place.parent == old.get()) each->place.parent = group_.get();
    if (each->place.leader == old.get()) each->place.leader = group_.get();
  }
  const auto mesh = old->context().mesh();
  without_gil([&] { engine::Context::create(groups, mesh); });
}

void arrange(const std::vector<Group*>& groups, const std::vector<int>& parents, const std::vector<int>& leaders,
             const DeviceMesh& mesh) {
  const auto at = [&](int i) { return i < 0 ? nullptr : &groups[static_cast<size_t>(i)]->engine(); };
  std::vector<engine::ParamGroup*> engines;
  for (size_t i = 0; i < groups.size(); ++i) {
    engines.push_back(&groups[i]->engine());
    engines.back()->place.parent = at(parents[i]);
    engines.back()->place.leader = at(leaders[i]);
  }
  without_gil([&] { engine::Context::create(engines, mesh); });
}

}  // namespace fsdp::python
