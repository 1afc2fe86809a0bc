"""FullyShardedDataParallel: what users construct and call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp._common_utils import FSDP_PREFIX, TrainingState
from torch.distributed.fsdp._wrap_utils import _auto_wrap
from torch.distributed.tensor import DTensor

from .._fully_shard import find_parameters, managed_modules, move_to_device
from . import _arguments, _optim_state, _ranks, _state_dicts, _summon
from ._buffers import CastBuffers
from ._clip import clip_grad_norm
from ._comm_hook import set_comm_hook
from ._ranks import HYBRID
from ._unit import Unit, units_in

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


class FullyShardedDataParallel(TorchFSDP):
    """Wraps ``module``, and shards its parameters that no wrapper inside took. Collective. On any device that the
    engine knows; without torch.distributed, over this rank alone.

    A subclass of torch's, whose arguments it takes and of which it overrides every method.

    With ``use_orig_params=True`` the module's parameters stay the objects that they were, and are this rank's stretch
    of each, 1-D and maybe empty, between steps. Otherwise one parameter, ``_flat_param``, stands for all of them.
    Whole they are in forward and backward, and in :meth:`summon_full_params`.

    Args:
        process_group: the ranks, or (shard, replicate) with a hybrid strategy. Default: all.
        sharding_strategy: default: FULL_SHARD. NO_SHARD keeps a whole copy between steps, and another while the module
            runs.
        cpu_offload: on CPU ranks state is in host memory anyway; elsewhere NotImplementedError.
        auto_wrap_policy: one of ``libfsdp.wrap``, or a function of that kind: which modules inside to wrap first.
        backward_prefetch: None: nothing is gathered ahead in backward. PRE and POST are one: the engine's order.
        mixed_precision: of parameters, reductions and buffers. If the environment has FSDP_USE_FULL_PREC_IN_EVAL=1
            now, for modules in training alone: each change of mode makes the engine's groups anew.
        ignored_modules, ignored_states: what stays as it is.
        param_init_fn: gives values to a module on the meta device; default: its ``reset_parameters``.
        device_id: the device that states are moved to, where there is more than one kind.
        sync_module_states: start from the first rank's values.
        forward_prefetch, limit_all_gathers: accepted; the engine gathers ahead, and limits it, by itself.
        device_mesh: instead of a process group; state dicts are then of DTensors.

    Raises:
        ValueError: arguments that do not fit each other or the module, or modules that differ between ranks.
        NotImplementedError: what is not there yet.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ):
        nn.Module.__init__(self)  # not torch's wrapper's
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            warnings.warn("FSDP will not all-gather parameters for containers that do not implement forward: "
                          f"{module}", stacklevel=2)
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        precision = mixed_precision or MixedPrecision()
        self._fsdp_wrapped_module = module
        self._ignored_modules, self._ignored_params = _arguments.ignored(module, ignored_modules, ignored_states)
        device = _device(device_mesh, device_id)
        if cpu_offload is not None and cpu_offload.offload_params and device.type != "cpu":
            raise NotImplementedError(f"libfsdp does not have CPUOffload yet on {device.type} devices")
        ranks = _ranks.resolve(process_group, strategy, device_mesh, auto_wrap_policy is not None, device.type)
        if auto_wrap_policy is not None:
            inner = {
                "process_group": process_group,
                "sharding_strategy": sharding_strategy,
                "cpu_offload": cpu_offload,
                "backward_prefetch": backward_prefetch,
                "mixed_precision": mixed_precision,
                "param_init_fn": param_init_fn,
                "device_id": device_id,
                "sync_module_states": sync_module_states,
                "forward_prefetch": forward_prefetch,
                "limit_all_gathers": limit_all_gathers,
                "use_orig_params": use_orig_params,
                "ignored_states": self._ignored_params,
                "device_mesh": device_mesh,
            }
            if strategy in HYBRID and device_mesh is None and ranks.group is not None:
                inner["process_group"] = (ranks.group, ranks.replicas)
            _auto_wrap(module, auto_wrap_policy, self._ignored_modules, self._ignored_params, inner, type(self))

        emptied = _arguments.materialise(module, self._ignored_modules, param_init_fn, device)
        found = find_parameters([module], self._ignored_params, scalars=True)
        for each in found:
            if isinstance(each.param, DTensor):
                raise NotImplementedError(f"libfsdp: parameter '{each.name}' is a DTensor: FullyShardedDataParallel does "
                                          "not go with tensor parallelism yet, fully_shard does")
        move_to_device([module], self._ignored_params, found, device)
        ranks.engine.require_same(
            f"FullyShardedDataParallel of module '{type(module).__name__}'",
            [f"{each.name} {list(each.param.shape)} {each.param.dtype}{'' if each.param.requires_grad else ' frozen'}"
             for each in found] + [f"{strategy} {precision} use_orig_params {use_orig_params}"])
        if sync_module_states:
            _arguments.copy_from_first(module, self._ignored_params, (ranks.group, ranks.replicas))
        self._cast_buffers = CastBuffers(module, self._ignored_modules, precision.buffer_dtype)
        unit = Unit(self, self.module, found, ranks, strategy, precision, use_orig_params, backward_prefetch,
                    self._cast_buffers)
        unit.attach()
        unit.emptied = emptied
        self._unit = unit
        _state_dicts.attach(self)
        self._state_dict_type = StateDictType.FULL_STATE_DICT
        self._state_dict_config: StateDictConfig = FullStateDictConfig()
        self._optim_state_dict_config: OptimStateDictConfig = FullOptimStateDictConfig()
        # What libraries read of torch's.
        self.process_group, self._inter_node_pg, self._device_mesh = ranks.group, ranks.replicas, device_mesh
        self.rank = dist.get_rank(ranks.group) if ranks.group is not None else 0
        self.world_size = dist.get_world_size(ranks.group) if ranks.group is not None else 1
        self.sharding_strategy, self.mixed_precision = strategy, precision
        self.cpu_offload = cpu_offload or CPUOffload()
        self.backward_prefetch, self.forward_prefetch = backward_prefetch, forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self.compute_device = device
        self._use_orig_params = use_orig_params
        self._comm_hook: Any = None
        self._comm_hook_state: Any = None

    # --- the module ---------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Of the wrapped module. Parameters are whole inside of it, inputs cast as ``mixed_precision`` says."""
        return self._fsdp_wrapped_module(*args, **kwargs)

    @property
    def _has_params(self) -> bool:
        return len(self._unit.pieces) > 0

    @property
    def params(self) -> list[nn.Parameter]:
        """Those that this wrapper itself took."""
        return self._unit.params

    @property
    def _flat_param(self) -> nn.Parameter | None:
        return self._unit.flat_param

    @property
    def _is_root(self) -> bool | None:
        return self._unit.outermost if self._unit._ready else None

    @property
    def training_state(self) -> TrainingState:
        if self._unit.summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        return TrainingState.FORWARD_BACKWARD if self._unit.group.busy else TrainingState.IDLE

    def check_is_root(self) -> bool:
        """Whether this is the outermost wrapper; if none ran yet, that is from now on. Collective the first time."""
        self._unit.ready()
        return self._unit.outermost

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers at and below ``module``, torch's own among them; with ``root_only``, those inside none of the
        others."""
        wrappers = [each for each in module.modules() if isinstance(each, TorchFSDP)]
        if not root_only:
            return wrappers
        inside = {each for wrapper in wrappers for each in wrapper.modules() if each is not wrapper}
        return [wrapper for wrapper in wrappers if wrapper not in inside]

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """As nn.Module's, over whole parameters, of which this rank's part is kept. Collective. ValueError inside
        a forward, a backward or :meth:`summon_full_params`."""
        self._unit.assert_idle("apply")
        with _summon.summoned([self._unit], True, False, False, False):
            return nn.Module.apply(self, fn)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        unit = self._unit
        if unit._ready:
            unit.group.reshard()
        with unit.emptied.watch(self.module):  # this may be of to_empty()
            result = nn.Module._apply(self, fn, recurse)
        if not unit.summoned:
            unit.adopt()
        return result

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As nn.Module's; inside :meth:`summon_full_params` under the names of the unwrapped module."""
        for name, param in nn.Module.named_parameters(self, *args, **kwargs):
            yield name.replace(FSDP_PREFIX, "") if self._unit.summoned else name, param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As :meth:`named_parameters`."""
        for name, buffer in nn.Module.named_buffers(self, *args, **kwargs):
            yield name.replace(FSDP_PREFIX, "") if self._unit.summoned else name, buffer

    def _buffers_of(self) -> Iterator[tuple[nn.Module, str, torch.dtype | None]]:
        """(module, name, dtype before it was cast) of the buffers that this wrapper is nearest to."""
        for _, module in managed_modules([self._fsdp_wrapped_module]):
            for name in module._buffers:
                yield module, name, self._cast_buffers.dtype_before(module, name)

    @staticmethod
    @contextmanager
    def summon_full_params(module: nn.Module, recurse: bool = True, writeback: bool = True, rank0_only: bool = False,
                           offload_to_cpu: bool = False, with_grads: bool = False) -> Iterator[None]:
        """Parameters of the wrappers in ``module`` are whole inside, in their own dtype; with ``writeback`` this rank's
        part of what they are at the end is kept. Collective. A forward inside must be under no_grad.

        Raises:
            NotImplementedError: ``writeback`` with ``rank0_only``; ``with_grads`` with ``rank0_only``,
                ``offload_to_cpu``, or without ``use_orig_params``.
            AssertionError: inside a forward or a backward, or in another such context.
        """
        with _summon.summoned(_summon.units_to_summon(module, recurse), writeback, rank0_only, offload_to_cpu,
                              with_grads):
            yield

    # --- training -----------------------------------------------------------------------------------------------------

    def _as_root(self, what: str) -> list[Unit]:
        if not self.check_is_root():
            raise RuntimeError(f"`{what}()` on inner FSDP instances is not supported. Please call `{what}()` on root "
                               "FSDP module. It should only be called on the root FSDP instance.")
        self._unit.assert_idle(what)
        return units_in(self)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients stay unsharded and unreduced on this rank and accumulate, until the first backward after it.
        RuntimeError on an inner wrapper."""
        groups = [unit.group for unit in self._as_root("no_sync")]
        before = [(group.sync_gradients, group.all_reduce_gradients) for group in groups]
        for group in groups:
            group.sync_gradients = group.all_reduce_gradients = False
        try:
            yield
        finally:
            for group, (syncs, reduces) in zip(groups, before):
                group.sync_gradients, group.all_reduce_gradients = syncs, reduces

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their joint norm is at most ``max_norm``; returns the norm before, equal on all
        ranks. Collective. RuntimeError on an inner wrapper."""
        self._as_root("clip_grad_norm_")
        return clip_grad_norm(self, max_norm, norm_type)

    def register_comm_hook(self, state: object, hook: Callable[..., None]) -> None:
        """Gradients are reduced by ``hook(state, gradients, output)``: the flat gradients of one wrapper, as long for
        each rank as for the one that holds most, and where this rank's part, averaged, belongs. With NO_SHARD, and on
        one rank, by ``hook(state, gradients)``, which averages in place. On every rank. AssertionError with hybrid
        strategies."""
        if not self.check_is_root():
            raise AssertionError("register_comm_hook can only be called on a root instance.")
        if not callable(hook):
            raise ValueError(f"The communication hook must be callable but got {hook}")
        units = units_in(self)
        for unit in units:
            if unit.strategy in HYBRID:
                raise AssertionError(f"Communication hook is not supported for hybrid strategies: {unit.strategy}")
            if unit.modules[0]._comm_hook is not None:
                raise AssertionError("A communication hook is already registered")
        for unit in units:
            unit.modules[0]._comm_hook, unit.modules[0]._comm_hook_state = hook, state
            set_comm_hook(unit, state, hook)

    # --- state dicts --------------------------------------------------------------------------------------------------

    @staticmethod
    def set_state_dict_type(module: nn.Module, state_dict_type: StateDictType,
                            state_dict_config: StateDictConfig | None = None,
                            optim_state_dict_config: OptimStateDictConfig | None = None) -> StateDictSettings:
        """The shape of state dicts of all wrappers in ``module`` from now on; returns what it was. RuntimeError for
        configs of another type than that."""
        kinds = _CONFIGS[state_dict_type]
        given = (state_dict_config or kinds[0](), optim_state_dict_config or kinds[1]())
        for what, config, kind in zip(("state_dict_config", "optim_state_dict_config"), given, kinds):
            if type(config) is not kind:
                raise RuntimeError(f"Expected {what} of type {kind} but got {type(config)}")
        before = FullyShardedDataParallel.get_state_dict_type(module)
        wrappers = FullyShardedDataParallel.fsdp_modules(module)
        if state_dict_type is StateDictType.SHARDED_STATE_DICT:
            # Read by libraries.
            given[0]._use_dtensor = given[1]._use_dtensor = any(each._device_mesh is not None for each in wrappers)
        for wrapper in wrappers:
            wrapper._state_dict_type = state_dict_type
            wrapper._state_dict_config, wrapper._optim_state_dict_config = given
        return before or StateDictSettings(None, None, None)

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Of all wrappers in ``module``; AssertionError if they differ."""
        settings = None
        for wrapper in FullyShardedDataParallel.fsdp_modules(module):
            its = StateDictSettings(wrapper._state_dict_type, wrapper._state_dict_config,
                                    wrapper._optim_state_dict_config)
            if settings is not None and its != settings:
                raise AssertionError("All FSDP modules must have the same state dict settings."
                                     f"Got {its} and {settings}.")
            settings = its
        return settings

    @staticmethod
    @contextmanager
    def state_dict_type(module: nn.Module, state_dict_type: StateDictType,
                        state_dict_config: StateDictConfig | None = None,
                        optim_state_dict_config: OptimStateDictConfig | None = None) -> Iterator[None]:
        """:meth:`set_state_dict_type`, inside alone."""
        before = FullyShardedDataParallel.set_state_dict_type(module, state_dict_type, state_dict_config,
                                                              optim_state_dict_config)
        try:
            yield
        finally:
            if before.state_dict_type is not None:
                FullyShardedDataParallel.set_state_dict_type(module, before.state_dict_type, before.state_dict_config,
                                                             before.optim_state_dict_config)

    @staticmethod
    def optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: dict[str, Any] | None = None,
                         group: dist.ProcessGroup | None = None) -> dict[str, Any]:
        """The optimizer's state under parameters' names, in the shape that :meth:`set_state_dict_type` says: whole
        tensors, or rows (with LOCAL_STATE_DICT too, as torch's). Collective. If the config says rank0_only, empty on all ranks but the first of ``group``
        (default: of the model's).

        Raises:
            NotImplementedError: state that does not lie as its parameter does.
            RuntimeError: optimizers of other parameters on other ranks.
        """
        settings = FullyShardedDataParallel.get_state_dict_type(model)
        config = settings.optim_state_dict_config
        return _optim_state.gathered(model, optim, optim_state_dict,
                                     whole=settings.state_dict_type is StateDictType.FULL_STATE_DICT,
                                     keeps=not getattr(config, "rank0_only", False) or _is_first(model, group),
                                     to_cpu=config.offload_to_cpu)

    @staticmethod
    def optim_state_dict_to_load(model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: dict[str, Any],
                                 is_named_optimizer: bool = False, load_directly: bool = False,
                                 group: dist.ProcessGroup | None = None) -> dict[str, Any]:
        """This rank's part of what :meth:`optim_state_dict` returned, whichever its shape, for ``optim``; with
        ``load_directly`` it is loaded too. Keyed by numbers, or with ``is_named_optimizer`` by the names of
        ``model.named_parameters()``. If the settings say rank0_only, the first rank's counts. Collective.

        Raises:
            KeyError: a group of ``optim`` that is not in it.
            ValueError: a group that is in several; parts of one flat parameter that stepped differently.
        """
        settings = FullyShardedDataParallel.get_state_dict_type(model)
        if getattr(settings.optim_state_dict_config, "rank0_only", False):
            optim_state_dict = _from_first(model, optim_state_dict, group)
        mine = _optim_state.cut(model, optim, optim_state_dict, by_name=is_named_optimizer)
        if load_directly:
            optim.load_state_dict(mine)
        return mine

    # --- older names of the two ---------------------------------------------------------------------------------------

    @staticmethod
    def full_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, optim_input: Any = None,
                              rank0_only: bool = True, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
        """:meth:`optim_state_dict` of whole tensors, in host memory."""
        _optim_state.warn("full_optim_state_dict", "optim_state_dict", optim_input)
        return _optim_state.gathered(model, optim, None, whole=True, keeps=not rank0_only or _is_first(model, group),
                                     to_cpu=True)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer,
                                 group: dist.ProcessGroup | None = None) -> dict[str, Any]:
        """:meth:`optim_state_dict` of rows."""
        _optim_state.warn("sharded_optim_state_dict", "optim_state_dict")
        return _optim_state.gathered(model, optim, None, whole=False, keeps=True, to_cpu=False)

    @staticmethod
    def shard_full_optim_state_dict(full_optim_state_dict: dict[str, Any], model: nn.Module, optim_input: Any = None,
                                    optim: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """:meth:`optim_state_dict_to_load`; without ``optim`` for one that was built from ``optim_input``, or from the
        model's parameters."""
        _optim_state.warn("shard_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
        return _optim_state.cut(model, optim, full_optim_state_dict, optim_input=optim_input)

    @staticmethod
    def flatten_sharded_optim_state_dict(sharded_optim_state_dict: dict[str, Any], model: nn.Module,
                                         optim: torch.optim.Optimizer) -> dict[str, Any]:
        """:meth:`optim_state_dict_to_load`."""
        _optim_state.warn("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        return _optim_state.cut(model, optim, sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(full_optim_state_dict: dict[str, Any] | None, model: nn.Module,
                                      optim_input: Any = None, optim: torch.optim.Optimizer | None = None,
                                      group: Any = None) -> dict[str, Any]:
        """:meth:`shard_full_optim_state_dict` of what the first rank has. Collective."""
        _optim_state.warn("scatter_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
        return _optim_state.cut(model, optim, _from_first(model, full_optim_state_dict, group),
                                optim_input=optim_input)

    @staticmethod
    def rekey_optim_state_dict(optim_state_dict: dict[str, Any], optim_state_key_type: OptimStateKeyType,
                               model: nn.Module, optim_input: Any = None,
                               optim: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """A whole state dict keyed by numbers, as of an unwrapped ``model``, keyed by names, or back. ValueError for
        another model's."""
        _optim_state.warn_of(optim_input)
        by_name = optim_state_key_type is OptimStateKeyType.PARAM_NAME
        return _optim_state.rekeyed(optim_state_dict, by_name, model, optim, optim_input)


def _ranks_of(model: nn.Module) -> dist.ProcessGroup:
    """All ranks that ``model`` is sharded over; of one with hybrid strategies, or over several groups, all there are."""
    groups = {unit.ranks.group if unit.ranks.replicas is None else None for unit in units_in(model)}
    return groups.pop() if len(groups) == 1 and None not in groups else dist.group.WORLD


def _is_first(model: nn.Module, group: dist.ProcessGroup | None) -> bool:
    return not dist.is_initialized() or dist.get_rank(group or _ranks_of(model)) == 0


def _from_first(model: nn.Module, value: Any, group: dist.ProcessGroup | None) -> Any:
    """What the first rank of ``group`` (default: of the model's) has. Collective."""
    if not dist.is_initialized():
        return value
    group = group or _ranks_of(model)
    held = [value if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(held, dist.get_global_rank(group, 0), group=group)
    return held[0]


def _device(mesh: DeviceMesh | None, device_id: int | torch.device | None) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device_id is None:
        return torch.device(mesh.device_type) if mesh is not None else accelerator or torch.device("cpu")
    if not isinstance(device_id, int):
        return torch.device(device_id)
    if accelerator is None:
        raise ValueError(f"libfsdp: device_id {device_id} names an accelerator, and there is none: leave it out, or "
                         "pass torch.device('cpu')")
    return torch.device(accelerator.type, device_id)
