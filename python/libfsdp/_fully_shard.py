"""fully_shard: looks at the modules, checks them, and makes their parameters one group of sharded ones."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from . import _C, _optimizers_on_rows, _stale_optimizers
from ._mesh import default_mesh
from ._module import FSDPModule, sharded_class
from ._placement import DataParallel, Layout, data_parallel, layout_of
from ._state import FSDPState, Home, below, is_replicated, state_of


class Found:
    """A parameter to shard, and all the places where it is registered."""

    def __init__(self, name: str, param: nn.Parameter):
        self.name = name
        self.param = param
        self.places: list[tuple[nn.Module, str]] = []


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
):
    """Shards the parameters of ``module`` (or of a list of modules, as one group) over the ranks of ``mesh``, in place,
    and returns it. Collective. Apply it to the inner modules first: a call takes what no earlier call took.

    Each parameter becomes a DTensor of the same global shape, ``(Shard(0),)`` or ``(Replicate(), Shard(0))``, of which
    this rank holds its rows; it is whole while a forward of the module runs. Gradients and optimizer states are
    DTensors alike. The module's class becomes a subclass of :class:`FSDPModule` and of its own.

    A parameter that is a DTensor already, of tensor parallelism on another axis of the mesh that ``mesh`` is a part of,
    becomes one on both; while a forward runs it is the DTensor that it was.

    Args:
        module: any module that implements ``forward``.
        mesh: of one axis (shard) or two (replicate, shard). Default: all ranks.
        reshard_after_forward: whether to free the whole parameters between forward and backward. Default: for all but
            the outermost module. A number n, a factor of the shard axis: 1/n of them stays on each rank, and backward
            gathers over n consecutive ranks alone; 1 means False, the size of the axis True.
        shard_placement_fn: gives the ``Shard`` that a parameter lies as, or None for ``Shard(0)``. The size of a dim
            other than the first must be a multiple of the shard axis. A ``ShardPlacementResult`` gives a mesh of the
            parameter's own too (experts, over fewer ranks than the rest): its ranks must be among those of the
            outermost module's mesh, and the parameters of each mesh are gathered and reduced by themselves.
        mp_policy: dtypes of the whole parameters, the reduction, and of what the forward gets and returns.
        offload_policy: with ``CPUOffloadPolicy``, sharded parameters, gradients and optimizer states are in host
            memory, page-locked with ``pin_memory``; gathers copy from there and reductions to there. On a mesh of CPU
            devices they always are, and nothing changes.
        ignored_params: parameters that stay as they are.
        dp_mesh_dims: ``mesh`` has other axes too, these are the data-parallel ones, and all parameters are DTensors on
            ``mesh``, replicated on these. Several shard axes become one in the sharded parameters. Without a shard
            axis parameters stay whole, and gradients are averaged over the replicas.

    Raises:
        ValueError: the modules differ between ranks, a parameter is a scalar, belongs to another group already or lies
            on a mesh that does not fit, or an argument is wrong.
        AssertionError: applied twice to one module.
    """
    modules = _modules(module)
    _optimizers_on_rows.install()
    ranks = data_parallel(mesh if mesh is not None else default_mesh(), dp_mesh_dims)
    device = _device(ranks.mesh)
    offload = _offload(offload_policy, device)
    reshard = _reshard(reshard_after_forward, ranks.pieces)
    ignored = ignored_params or set()

    found = find_parameters(modules, ignored)
    move_to_device(modules, ignored, found, device)
    choose = shard_placement_fn or (lambda param: None)
    layouts = [layout_of(each.name, each.param, ranks, choose) for each in found]
    ranks.engine_mesh().require_same(
        f"fully_shard of module '{type(modules[0]).__name__}'", _describe(found, layouts, mp_policy, reshard)
    )
    by_mesh: dict[DeviceMesh, tuple[DataParallel, list[tuple[Found, Layout]]]] = {ranks.mesh: (ranks, [])}
    for each, layout in zip(found, layouts):
        by_mesh.setdefault(layout.ranks.mesh, (layout.ranks, []))[1].append((each, layout))
    state, *beside = [_group_of(modules, *over, mp_policy, reshard, offload) for over in by_mesh.values()]
    state.beside = beside
    state.attach()
    for each in modules:
        each.__class__ = sharded_class(each.__class__)
    return module


fully_shard.state = state_of


# --- arguments --------------------------------------------------------------------------------------------------------


def _modules(module: Any) -> list[nn.Module]:
    modules = [module] if isinstance(module, nn.Module) else list(module)
    if not modules:
        raise ValueError("fully_shard needs at least one module, got an empty list")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise ValueError(f"fully_shard expects modules, got {type(each)}")
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward is nn.Module.forward:
            raise ValueError(f"fully_shard does not support containers that do not implement forward: {each}")
        if state_of(each) is not None:
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once. fully_shard has "
                f"already been applied to:\n{each}"
            )
    if len({id(each) for each in modules}) < len(modules):
        raise ValueError("fully_shard was given the same module twice; name each module once")
    return modules


def _offload(policy: OffloadPolicy, device: torch.device) -> tuple[torch.device, bool] | None:
    """Where whole parameters are while what is sharded is in host memory, and whether that is page-locked. On a CPU it
    is host memory anyway."""
    if not isinstance(policy, CPUOffloadPolicy) or device.type == "cpu":
        return None
    return device, policy.pin_memory


def _reshard(value: bool | int | None, size: int) -> bool | int | None:
    """``value``, where a number is one of the ``size`` ranks of the shard axis over which parameters are kept."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ValueError(f"reshard_after_forward should be a bool or an int, got {value!r}")
    if value < 1 or size % value != 0:
        raise ValueError(
            f"reshard_after_forward as an int should be a factor of {size}, the size of the shard axis, got {value}"
        )
    if value == 1:
        warnings.warn("reshard_after_forward=1 means a world of 1: reshard_after_forward=False", stacklevel=3)
        return False
    return True if value == size else value


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


# --- what there is to shard -------------------------------------------------------------------------------------------


def managed_modules(modules: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of the modules whose parameters this call takes, each once: not those inside sharded ones, nor
    those that torch's replicate was applied to."""
    seen: set[nn.Module] = set()
    for i, top in enumerate(modules):
        yield from _visit("" if len(modules) == 1 else str(i), top, seen)


def _visit(path: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if module in seen or state_of(module) is not None or is_replicated(module):
        return
    seen.add(module)
    yield path, module
    for name, child in module.named_children():
        yield from _visit(below(path, name), child, seen)


def find_parameters(modules: list[nn.Module], ignored: set[nn.Parameter], scalars: bool = False) -> list[Found]:
    """The parameters that a call on ``modules`` takes. ValueError for those that it cannot, of which scalars are unless
    ``scalars``."""
    found: dict[nn.Parameter, Found] = {}
    for path, module in managed_modules(modules):
        for name, param in module._parameters.items():
            if param is None or param in ignored:
                continue
            if param not in found:
                full = f"{path}.{name}" if path else name
                _check_parameter(full, param, scalars)
                found[param] = Found(full, param)
            found[param].places.append((module, name))
    return list(found.values())


def _check_parameter(name: str, param: nn.Parameter, scalars: bool) -> None:
    owner = _stale_optimizers.owner(param)
    taken = getattr(param, "_libfsdp_sharded", False) or getattr(param, "_libfsdp_slice", False)
    if owner is not None or taken:
        raise ValueError(
            f"parameter '{name}' was sharded already, as '{owner or name}' of another group: modules that share a "
            "parameter must be in one group. Shard them together, fully_shard([a, b]), or through a common parent"
        )
    if param.dim() == 0 and not scalars:
        raise ValueError(
            f"fully_shard cannot shard the scalar parameter '{name}'. Change {name} to a 1D tensor with numel equal to "
            "1."
        )
    if param.layout != torch.strided:
        raise ValueError(f"fully_shard needs dense parameters; '{name}' is {param.layout}")


def move_to_device(modules: list[nn.Module], ignored: set[nn.Parameter], found: list[Found], device: torch.device) -> None:
    """To the mesh's device, as torch's does. What is on the meta device stays there."""
    tensors = [each.param for each in found]
    for _, module in managed_modules(modules):
        tensors += [buffer for buffer in module._buffers.values() if buffer is not None]
    for tensor in tensors:
        if tensor.device != device and tensor.device.type != "meta":
            tensor.data = tensor.to(device)


def _describe(
    found: list[Found], layouts: list[Layout], policy: MixedPrecisionPolicy, reshard: bool | None
) -> list[str]:
    """What must be the same on all ranks."""
    lines = [
        f"{each.name} {list(layout.local.shape)} {each.param.dtype} {each.param.device.type}"
        f"{'' if each.param.requires_grad else ' frozen'}{' tied' if len(each.places) > 1 else ''}"
        f" {layout.sharded.placements} over {tuple(layout.ranks.mesh.shape)}"
        for each, layout in zip(found, layouts)
    ]
    return [*lines, f"{policy}", f"reshard_after_forward {reshard}"]


# --- what becomes of it -----------------------------------------------------------------------------------------------


def _group_of(modules: list[nn.Module], ranks: DataParallel, members: list[tuple[Found, Layout]],
              policy: MixedPrecisionPolicy, reshard: bool | int | None,
              offload: tuple[torch.device, bool] | None) -> FSDPState:
    """Makes one group of parameters that lie over the same ranks. Collective."""
    engine_ranks = ranks.engine_mesh()
    group = _C.Group(
        [each.name for each, _ in members],
        [layout.local for _, layout in members],
        [layout.dim for _, layout in members],
        engine_ranks,
        policy.param_dtype,
        policy.reduce_dtype,
        offload=offload,
    )
    group.set_shared(len(modules) > 1)
    homes = []
    for i, (each, layout) in enumerate(members):
        sharded = _sharded_parameter(each.param, group.shard(i), layout)
        group.place(i, sharded, [place_of(*place) for place in each.places], layout.whole)
        _stale_optimizers.mark(each.param, each.name)
        module, name = each.places[0]
        homes.append(Home(weakref.ref(module), name, layout.local.shape, layout.local.stride(), layout.whole))
    return FSDPState(modules, ranks.mesh, engine_ranks, group, homes, policy, _reshard(reshard, ranks.pieces),
                     shards=ranks.shards)


def _sharded_parameter(param: nn.Parameter, local: torch.Tensor, layout: Layout) -> nn.Parameter:
    """A DTensor parameter over ``local`` in the place of ``param``, with its attributes, hooks and gradient."""
    sharded = nn.Parameter(DTensor(local, layout.sharded, requires_grad=False), requires_grad=param.requires_grad)
    sharded.__dict__.update(param.__dict__)
    sharded._libfsdp_sharded = True
    if param._backward_hooks:
        sharded._backward_hooks = param._backward_hooks
    if param._post_accumulate_grad_hooks:
        sharded._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
    if param.grad is not None:
        gradient = param.grad if layout.whole is None else layout.whole.local_gradient(param.grad)
        chunks, mine = gradient.chunk(layout.ranks.pieces, layout.dim), layout.ranks.piece
        empty = gradient.new_empty(local.shape)
        rows = chunks[mine].clone(memory_format=torch.contiguous_format) if mine < len(chunks) else empty
        rows = rows.to(local.device)
        sharded.grad = DTensor(rows, layout.sharded, requires_grad=False)
    return sharded


def place_of(module: nn.Module, name: str) -> tuple[dict, str, Any]:
    # A class with a __setattr__ of its own keeps track of its parameters (an RNN): it must see every change.
    follows = type(module).__setattr__ is not nn.Module.__setattr__
    return module._parameters, name, weakref.ref(module) if follows else None
