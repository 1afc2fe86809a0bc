#include <ATen/core/Tensor.h>

#include "bindings.h"
#include "custom.h"
#include "group.h"

namespace fsdp::python {
namespace {

using engine::GroupFlags;

std::unique_ptr<Group> make_group(std::vector<std::string> names, std::vector<at::Tensor> params,
                                  std::vector<int64_t> dims, const DeviceMesh& mesh,
                                  std::optional<at::ScalarType> param_dtype, std::optional<at::ScalarType> reduce_dtype,
                                  bool flat, bool keep_reduced, std::optional<std::pair<c10::Device, bool>> offload) {
  std::optional<engine::Offload> to_host;
  if (offload) to_host = engine::Offload{offload->first, offload->second};
  return std::make_unique<Group>(std::move(names), std::move(params), std::move(dims), mesh,
                                 engine::DtypePolicy{param_dtype, reduce_dtype, keep_reduced},
                                 flat ? engine::Layout::kFlat : engine::Layout::kRows, to_host);
}

/// `act` is the group's own, and is not called after it is gone.
Where within(const Group& group, const char* act) {
  return [&group, act] { return std::string("in ") + act + " of group '" + group.engine().name() + "'"; };
}

using PlaceTuple = std::tuple<py::dict, py::str, py::object>;

std::vector<Place> places_of(const std::vector<PlaceTuple>& at) {
  std::vector<Place> places;
  for (const auto& [table, name, follower] : at) places.push_back({table, name, follower});
  return places;
}

void place(Group& group, size_t i, py::object user, const std::vector<PlaceTuple>& at, py::object wrapper) {
  group.place(i, std::move(user), places_of(at), std::move(wrapper));
}

void hide(Group& group, size_t i, py::object flat, int64_t offset, const PlaceTuple& holder,
          const std::vector<PlaceTuple>& at) {
  group.hide(i, std::move(flat), offset, places_of({holder})[0], places_of(at));
}

/// A switch of the group that other ranks must have alike.
template <auto Member>
void bind_flag(py::class_<Group>& type, const char* name) {
  type.def_property(
      name, [](Group& group) { return group.engine().flags().*Member; },
      [](Group& group, std::remove_reference_t<decltype(std::declval<GroupFlags>().*Member)> value) {
        group.engine().flags().*Member = value;
        group.note_config_change();
      });
}

void set_prefetch(Group& group, const std::vector<Group*>& groups, bool backward) {
  auto& place = group.engine().place;
  auto& list = backward ? place.backward_prefetch : place.forward_prefetch;
  list.clear();
  for (auto* each : groups) list.push_back(&each->engine());
  (backward ? place.explicit_backward_prefetch : place.explicit_forward_prefetch) = true;
  group.engine().context().note_config_change();
}

py::dict stats(Group& group) {
  const auto& stats = group.engine().context().stats();
  py::dict out;
  out["gathers"] = stats.gathers;
  out["reduces"] = stats.reduces;
  out["all_reduces"] = stats.all_reduces;
  out["agreements"] = stats.agreements;
  out["unsharded_param_bytes"] = stats.unsharded_params.now;
  out["peak_unsharded_param_bytes"] = stats.unsharded_params.peak;
  out["unsharded_gradient_bytes"] = stats.unsharded_gradients.now;
  out["peak_unsharded_gradient_bytes"] = stats.unsharded_gradients.peak;
  return out;
}

std::vector<std::tuple<std::string, std::string, std::string>> schedule(Group& group) {
  std::vector<std::tuple<std::string, std::string, std::string>> lines;
  for (const auto& event : group.engine().context().events()) {
    lines.emplace_back(engine::name_of(event.phase), event.act, event.group);
  }
  return lines;
}

const char* gather_state(Group& group) {
  switch (group.engine().state()) {
    case engine::GatherState::kSharded:
      return "sharded";
    case engine::GatherState::kGathering:
      return "gathering";
    default:
      return "unsharded";
  }
}

}  // namespace

void bind_group(py::module_& module) {
  // Numbers and not an enum type: this is read in every hook.
  module.attr("LEFT_NESTED") = static_cast<int>(Group::Left::kNested);
  module.attr("LEFT_ENDED") = static_cast<int>(Group::Left::kEnded);
  module.attr("LEFT_FAILED") = static_cast<int>(Group::Left::kFailed);
  py::class_<Group> type(module, "Group", "What one call of fully_shard made.");
  type.def(py::init(&make_group), py::arg("names"), py::arg("params"), py::arg("dims"), py::arg("mesh"),
           py::arg("param_dtype"), py::arg("reduce_dtype"), py::arg("flat") = false, py::arg("keep_reduced") = false,
           py::arg("offload") = py::none(),
           "Copies this rank's rows, along `dims`, of `params`; `flat`: its elements of all, one after another; "
           "`keep_reduced`: gradients stay in the dtype that they were reduced in; `offload`: to host memory, "
           "page-locked "
           "or not, and whole parameters are on that device. Collective.")
      .def("__len__", &Group::size)
      .def("shard", &Group::shard, py::arg("i"), "This rank's rows of the i-th parameter; all share one buffer.")
      .def("place", &place, py::arg("i"), py::arg("user"), py::arg("places"), py::arg("wrapper"),
           "Shows the i-th parameter as `user`, a parameter that is a DTensor or becomes an ordinary tensor over "
           "shard(i), at each (table, name, weak reference or None); whole as what `wrapper` makes of it, if that is "
           "not None.")
      .def("hide", &hide, py::arg("i"), py::arg("flat"), py::arg("offset"), py::arg("holder"), py::arg("places"),
           "Shows the i-th parameter as the whole alone; users hold `flat`, at `holder`, whose elements from `offset` "
           "on it is.")
      .def("extend", &Group::extend, py::arg("i"), py::arg("impl"), py::arg("like"),
           "Gathers of the i-th parameter move what `impl` sends, tensors like `like`, and `impl` shows it whole.")
      .def("extended", &Group::extended, py::arg("i"), "Whether the i-th parameter has an extension.")
      .def("set_shared", &Group::set_shared, py::arg("several"), "Whether it stands for several modules.")
      .def("set_name", &Group::set_name, py::arg("name"), py::arg("params"), "Names of the group and its parameters.")
      .def(
          "set_custom_all_gather",
          [](Group& group, py::object comm, py::object process_group) {
            group.set_custom_gather(
                custom_all_gather(std::move(comm), std::move(process_group), within(group, "the custom all-gather")));
          },
          py::arg("comm"), py::arg("process_group"), "Gathers by `comm`, of torch's interface; None: by the engine.")
      .def(
          "set_custom_reduce_scatter",
          [](Group& group, py::object comm, py::object process_group) {
            group.set_custom_reduce(custom_reduce_scatter(std::move(comm), std::move(process_group),
                                                          within(group, "the custom reduce-scatter")));
          },
          py::arg("comm"), py::arg("process_group"), "Reduces by `comm`, of torch's interface; None: by the engine.")
      .def(
          "set_all_reduce_hook",
          [](Group& group, py::object hook, std::optional<c10::Stream> stream) {
            group.set_all_reduce_hook(tensor_hook(std::move(hook), within(group, "the all-reduce hook")), stream);
          },
          py::arg("hook"), py::arg("stream"),
          "Called with this rank's averaged gradients, flat, on `stream` of a device that has them; None: not.")
      .def(
          "set_custom_all_reduce",
          [](Group& group, py::object reduce) {
            group.set_custom_all_reduce(tensor_hook(std::move(reduce), within(group, "the custom all-reduce")));
          },
          py::arg("reduce"), "Averages this rank's gradients, flat and in place, where parameters are not cut.")
      .def_property_readonly("has_custom_collective", &Group::has_custom_collective)
      .def("share_memory", &Group::share_memory,
           "The whole parameters lie in memory that the ranks of a host have in common. Collective.")
      .def("keep_over", &Group::keep_over, py::arg("ranks"),
           "Between forward and backward, keep the parameters over this many ranks; 0: do not. Collective.")
      .def_property_readonly("name", [](Group& group) { return group.engine().name(); })
      .def_property_readonly("busy", &Group::busy, "Whether a forward or a backward needs the whole parameters now.")
      .def_readwrite("lent", &Group::lent,
                     "While set, modules show something else than the parameters, and adopt() looks away.")
      .def_property_readonly("parameter_names", &Group::parameter_names)
      .def_property_readonly("state", &gather_state, "'sharded', 'gathering' or 'unsharded'.")
      .def("enter", &Group::enter, "A forward begins: gathers, and shows the parameters whole. Nests.")
      .def(
          "leave", [](Group& group) { return static_cast<int>(group.leave()); }, "One of the LEFT_ numbers.")
      .def("set_gathers_in_backward", &Group::set_gathers_in_backward, py::arg("gathers"),
           "Whether watched outputs do. If not, the first operator that reads a parameter does.")
      .def("reduce_held", &Group::reduce_held,
           "Reduces the gradients that backwards without synchronisation left. Collective.")
      .def("watch", &Group::watch, py::arg("outputs"), "A backward from these gathers the group.")
      .def("unshard", &Group::unshard, py::arg("wait"), "Gathers by hand. Collective.")
      .def("reshard", &Group::reshard, "Frees the whole parameters and shows DTensors.")
      .def("reset", &Group::reset, "Ends the iteration of the model after an error. Collective.")
      .def("show_sharded", &Group::show_sharded, "Shows DTensors, unless a forward or a backward needs the whole.")
      .def("adopt", &Group::adopt,
           "Takes over replaced parameters; False if they have another dtype or device: see rebuild().")
      .def("rebuild", &Group::rebuild, "As adopt(), for any dtype and device. Collective.")
      .def(
          "set_dtypes",
          [](Group& group, std::optional<at::ScalarType> param_dtype, std::optional<at::ScalarType> reduce_dtype,
             bool keep_reduced) {
            group.set_policy({param_dtype, reduce_dtype, keep_reduced});
          },
          py::arg("param_dtype"), py::arg("reduce_dtype"), py::arg("keep_reduced"),
          "Other dtypes from now on, between steps. Collective.")
      .def("set_prefetch", &set_prefetch, py::arg("groups"), py::arg("backward"))
      .def_property_readonly("stats", &stats, "Bytes alive and collectives issued by the model of this group.")
      .def_property_readonly("schedule", &schedule, "(phase, act, group) of the last iteration, in order of issue.");
  bind_flag<&GroupFlags::reshard_after_forward>(type, "reshard_after_forward");
  bind_flag<&GroupFlags::reshard_after_backward>(type, "reshard_after_backward");
  bind_flag<&GroupFlags::sync_gradients>(type, "sync_gradients");
  bind_flag<&GroupFlags::all_reduce_gradients>(type, "all_reduce_gradients");
  bind_flag<&GroupFlags::divide_factor>(type, "divide_factor");
  bind_flag<&GroupFlags::max_reductions>(type, "max_reductions");
  module.def(
      "arrange", &arrange, py::arg("groups"), py::arg("parents"), py::arg("leaders"), py::arg("mesh"),
      "Makes `groups` one model, in module order; the i-th is inside groups[parents[i]], -1 for none, and of the same "
      "modules as groups[leaders[i]], -1 for none. Collective.");
}

}  // namespace fsdp::python
