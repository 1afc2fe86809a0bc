"""What one call of fully_shard made, as Python holds it: the engine's group, the modules and the policy."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._common_utils import FSDP_WRAPPED_MODULE

from . import _C
from ._emptied import EmptiedBuffers
from ._extension import Extension, is_extended, runs_operators
from ._tensors import cast_floating, tensors_in
from ._whole_dtensor import WholeDTensor

_NESTED, _ENDED = _C.LEFT_NESTED, _C.LEFT_ENDED

#: In a module's __dict__.
_KEY = "_libfsdp_state"


def state_of(module: nn.Module) -> FSDPState | None:
    return module.__dict__.get(_KEY)


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's ``replicate`` was applied to the module."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, ())


class Model:
    """The states under one outermost sharded module. Read by torch's pipelining under torch's names."""

    def __init__(self, states: list[FSDPState]):
        self._states = [weakref.ref(state) for state in states]

    @property
    def all_states(self) -> list[FSDPState]:
        """In module order, the outermost first."""
        return [state for ref in self._states if (state := ref()) is not None]


@dataclass(frozen=True)
class Home:
    """Where a parameter of a group is registered first, and how it is whole."""

    module: weakref.ref[nn.Module]
    name: str
    size: torch.Size
    stride: tuple[int, ...]
    #: Where it is a DTensor of another parallelism too.
    whole: WholeDTensor | None


class FSDPState:
    """The state that a sharded module carries (``fully_shard.state(module)``).

    Modules hold it and it holds them weakly, so that a dropped model is freed at once.
    """

    def __init__(self, modules: list[nn.Module], mesh: DeviceMesh | None, engine_mesh: _C.Mesh, group: _C.Group,
                 homes: list[Home], policy: MixedPrecisionPolicy,
                 reshard_after_forward: bool | int | None, shards: bool = True):
        self._modules = [weakref.ref(module) for module in modules]
        self._homes = homes  # of the parameters, in order
        self.mesh = mesh
        self._shards = shards  # its last axis; else all replicate
        self._engine_mesh = engine_mesh
        self.group = group
        self.policy = policy
        self._input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self._auto_reshard = reshard_after_forward is None
        group.reshard_after_forward = reshard_after_forward is not False
        if not isinstance(reshard_after_forward, (bool, NoneType)):
            group.keep_over(reshard_after_forward)
        #: Those of the same modules' parameters that lie over other ranks. This one carries them.
        self.beside: list[FSDPState] = []
        self._state_ctx = Model([self])
        self._ready = False  # arranged with the module that is outermost
        self._outermost = False
        self._prefetch: dict[bool, list[weakref.ref[FSDPState]]] = {}  # by whether it is for backward
        self._post_optim_event: torch.Event | None = None
        self.emptied = EmptiedBuffers()  # those that may have got no values since the last forward

    @property
    def modules(self) -> list[nn.Module]:
        return [module for ref in self._modules if (module := ref()) is not None]

    @property
    def together(self) -> list[FSDPState]:
        """This and those beside it: all that one call of fully_shard made."""
        return [self, *self.beside]

    def attach(self) -> None:
        """Puts the state and its hooks on the modules."""
        for module in self.modules:
            module.__dict__[_KEY] = self
            # Where torch's composable APIs look for each other: replicate leaves what is sharded alone.
            module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())["fully_shard"] = RegistryItem()
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            # Always: a forward that throws must tell the other ranks.
            module.register_forward_hook(self.post_forward, always_call=True)
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_post_hook(self._after_load)

    # --- the order of groups ----------------------------------------------------------------------------------------

    def arrange(self) -> None:
        """Makes one model of all groups under this state's modules, with this one outermost. Collective.

        Done when the outermost module first needs it, so that modules may be sharded and put together in any order
        before. A module that ran by itself earlier joins.
        """
        states: list[FSDPState] = []
        parents: dict[FSDPState, FSDPState | None] = {}

        leaders: dict[FSDPState, FSDPState] = {}

        def join(state: FSDPState, enclosing: FSDPState | None) -> None:
            for each in state.together:
                states.append(each)
                parents[each] = enclosing
                if state.beside:
                    leaders[each] = state

        join(self, None)
        paths: dict[nn.Module, str] = {}
        for path, module, enclosing in self._walk():
            paths.setdefault(module, path)
            state = state_of(module)
            if state is None or state is self:
                continue
            if state not in parents:
                join(state, enclosing)
            elif parents[state] is not enclosing:
                # Its modules lie in several groups: inside none of them but the outermost.
                parents.update({each: self for each in state.together})
        for state in states:
            state._name(paths)
            state._check_locals()
            state.group.rebuild()  # what was replaced since, of whatever dtype and device
            state._extend()
            state._arranged(outermost=state in self.together)
        indices = {state: i for i, state in enumerate(states)}
        around, first = ([indices.get(of.get(state), -1) for state in states] for of in (parents, leaders))
        _C.arrange([state.group for state in states], around, first, self._engine_mesh)
        model = Model(states)
        for state in states:
            state._state_ctx = model
            state._ready = True
        for state in states:
            state._apply_prefetch()

    def _arranged(self, outermost: bool) -> None:
        """This state is about to be part of a model."""
        self._outermost = outermost
        if self._auto_reshard:
            self.group.reshard_after_forward = not outermost

    def _walk(self) -> Iterator[tuple[str, nn.Module, FSDPState]]:
        """(path, module, the innermost state around it) of all modules at and below this state's."""
        tops = self.modules
        for i, top in enumerate(tops):
            yield from _visit("" if len(tops) == 1 else str(i), top, self)

    def _name(self, paths: dict[nn.Module, str]) -> None:
        def dotted(home: Home) -> str:
            path = paths.get(home.module(), "?")
            return f"{path}.{home.name}" if path else home.name

        own = ", ".join(paths.get(module, "?") for module in self.modules)
        if state_of(self.modules[0]) is not self:
            own = f"{own or '(root)'} over {self.mesh.mesh_dim_names or tuple(self.mesh.shape)}"
        self.group.set_name(own, [dotted(home) for home in self._homes])

    def _locals(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(parameter's name, its local tensor) as they are in the modules now."""
        for name, home in zip(self.group.parameter_names, self._homes):
            module = home.module()
            param = module._parameters.get(home.name) if module is not None else None
            if param is not None:
                yield name, getattr(param, "_local_tensor", param)

    def _on_meta(self) -> list[str]:
        """Names of the parameters that lie on the meta device."""
        return [name for name, local in self._locals() if local.is_meta]

    def _check_locals(self) -> None:
        missing = self._on_meta()
        if missing:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the following were still "
                f"on meta device: {missing}. Call module.to_empty(device=...), then initialise or load them"
            )

    def _check_buffers(self) -> None:
        unfilled = [name for state in self._state_ctx.all_states for name in state.emptied.unfilled()]
        if unfilled:
            raise RuntimeError(
                f"libfsdp: to_empty() gave buffers {unfilled} memory, and nothing has given them values since. A state "
                "dict does not hold a buffer that is not persistent: compute it anew, in place or as a new tensor"
            )

    def _extend(self) -> None:
        """Lets local tensors that have the hooks for it say what is gathered of them. Collective where there are."""
        extensions = []
        for i, (name, home) in enumerate(zip(self.group.parameter_names, self._homes)):
            local = self.group.shard(i)
            if is_extended(name, local):
                if not self._shards:
                    raise NotImplementedError(
                        f"parameter '{name}' has fsdp_pre_all_gather and is not sharded (dp_mesh_dims without a shard "
                        "axis): nothing is gathered. Leave it out with ignored_params"
                    )
                if not self.group.extended(i):
                    dtype = self.policy.param_dtype if local.is_floating_point() else None
                    impl = Extension(name, home.size, home.stride, dtype or local.dtype, self.mesh, home.module(),
                                     self.policy, home.whole)
                    extensions.append((i, name, impl, impl.send(local)))
            elif runs_operators(local):
                raise NotImplementedError(
                    f"parameter '{name}' is a {type(local).__name__}, a tensor that runs operators itself: libfsdp can "
                    "gather it if it has fsdp_pre_all_gather and fsdp_post_all_gather. Give it those, or leave it out "
                    "with ignored_params"
                )
        if not extensions:
            return
        self._engine_mesh.require_same(
            f"fsdp_pre_all_gather in group '{self.group.name}'",
            [f"{name}: {[(list(each.shape), each.dtype) for each in sent]}" for _, name, _, sent in extensions],
        )
        for i, _, impl, sent in extensions:
            self.group.extend(i, impl, sent)

    def ready(self) -> list[_C.Group]:
        """The groups of these modules, as parts of a model."""
        if not self._ready:
            self.arrange()
        return [state.group for state in self.together]

    # --- forward ----------------------------------------------------------------------------------------------------

    def pre_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if not self._ready:
            self.arrange()
        elif self._outermost and not self.group.busy and not self.group.adopt():
            self._adopt_own()  # entering looks at the groups inside alone
        if EmptiedBuffers.waiting and self._outermost and not self.group.busy:
            self._check_buffers()
        if self._post_optim_event is not None:
            self._post_optim_event.synchronize()
            self._post_optim_event = None
        if self._input_dtype is not None:
            args, kwargs = cast_floating(args, self._input_dtype), cast_floating(kwargs, self._input_dtype)
        self.group.enter()
        for state in self.beside:
            state.group.enter()
        return args, kwargs

    def post_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        for state in reversed(self.beside):
            if state.group.leave() == _ENDED:
                state._watch(output)
        left = self.group.leave()
        if left == _ENDED:
            self._watch(output)
        elif left != _NESTED:
            return output
        if self.policy.output_dtype is not None:
            output = cast_floating(output, self.policy.output_dtype)
        return output

    def _watch(self, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            if output.requires_grad:
                self.group.watch([output])
        elif torch.is_grad_enabled():
            tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            self.group.watch(tensors)

    def shard_process_group(self) -> ProcessGroup:
        """torch's process group of the shard axis. NotImplementedError if there is none."""
        if not self._shards:
            raise NotImplementedError(
                f"libfsdp: group '{self.group.name}' is not sharded (dp_mesh_dims without a shard axis): it gathers and "
                "scatters nothing that a custom collective could do; reduce further in set_all_reduce_hook"
            )
        return self.mesh.get_group(self.mesh.ndim - 1)

    # --- settings ---------------------------------------------------------------------------------------------------

    def set_reshard_after_forward(self, value: bool) -> None:
        self._auto_reshard = False
        self.group.reshard_after_forward = value
        self.group.keep_over(0)

    def set_prefetch(self, states: list[FSDPState], backward: bool) -> None:
        # Where there are several, the last one is gathered last.
        last = self.together[-1]
        last._prefetch[backward] = [weakref.ref(each) for state in states for each in state.together]
        if self._ready:
            last._apply_prefetch()

    def _apply_prefetch(self) -> None:
        for backward, refs in self._prefetch.items():
            states = [state for ref in refs if (state := ref()) is not None]
            for state in states:
                if state._state_ctx is not self._state_ctx:
                    raise ValueError(
                        f"libfsdp: group '{state.group.name}' is not part of the same model as '{self.group.name}', so "
                        "it cannot be prefetched by it"
                    )
            self.group.set_prefetch([state.group for state in states], backward)

    # --- state dicts ------------------------------------------------------------------------------------------------

    def _before_state_dict(self, *_: Any) -> None:
        self.to_sharded()

    def to_sharded(self) -> None:
        """The modules show DTensors, unless a forward is under way."""
        for state in self.together:
            state.group.show_sharded()

    def _after_load(self, *_: Any) -> None:
        self.adopt()

    def adopt(self) -> None:
        """Takes over parameters that were replaced. Collective where their dtype or device changed."""
        for state in self.together:
            state._adopt_own()

    def _adopt_own(self) -> None:
        missing = len(self._on_meta())
        if 0 < missing < len(self.group):
            return  # to_empty() came to one of the group's modules, and comes to the others next
        if self.group.adopt():
            return
        self.group.rebuild()
        if self._ready:
            self._extend()
        for state in self._state_ctx.all_states:
            if state._ready:
                state._apply_prefetch()

    # --- what torch reads -------------------------------------------------------------------------------------------

    @property
    def _fsdp_param_groups(self) -> list[FSDPState]:
        return [state for state in self.together if len(state.group)]

    @property
    def _fsdp_param_group(self) -> FSDPState | None:
        return self if len(self.group) else None

    def post_backward(self) -> None:
        """Nothing by itself: :meth:`_root_post_backward_final_callback` reduces all groups of the model."""

    def _root_post_backward_final_callback(self) -> None:
        """Reduces what backwards with ``set_requires_gradient_sync(False)`` left, without another backward: a pipeline
        calls it after its last one. Collective."""
        self.ready()[0].reduce_held()


def below(path: str, name: str) -> str:
    """The path of a module's child. What a classic wrapper wraps is found where the wrapper is."""
    if name == FSDP_WRAPPED_MODULE:
        return path
    return f"{path}.{name}" if path else name


def _visit(path: str, module: nn.Module, enclosing: FSDPState) -> Iterator[tuple[str, nn.Module, FSDPState]]:
    yield path, module, enclosing
    state = state_of(module) or enclosing
    for name, child in module.named_children():
        yield from _visit(below(path, name), child, state)
