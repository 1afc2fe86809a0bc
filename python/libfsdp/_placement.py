"""How a parameter lies: over which ranks it is sharded, and as which DTensor it shows, sharded and whole."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard


@dataclass(frozen=True)
class DataParallel:
    """The ranks that one call of fully_shard shards and replicates over."""

    #: One axis (shard) or two (replicate, shard): what the engine communicates over.
    mesh: DeviceMesh
    #: With ``dp_mesh_dims``: the mesh that all parameters lie on already, and which of its axes are ``mesh``.
    full: DeviceMesh | None = None
    dims: DataParallelMeshDims | None = None


def data_parallel(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> DataParallel:
    """ValueError unless ``mesh`` has one axis (shard) or two (replicate, shard), or those that ``dims`` names."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"fully_shard expects mesh to be a torch DeviceMesh, got {type(mesh).__name__}")
    if dims is not None:
        return _named_axes(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}: one axis shards, two replicate and shard"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError(f"Please init the 2D mesh for HSDP with mesh_dim_names specified; {mesh} has none")
    return DataParallel(mesh)


def _named_axes(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataParallel:
    for name in (*dims.replicate_names, *dims.shard_names):
        if name not in (mesh.mesh_dim_names or ()):
            raise ValueError(f"dp_mesh_dims names the axis '{name}', which {mesh} does not have")
    if not dims.shard_names:
        raise NotImplementedError("libfsdp does not have dp_mesh_dims without a shard axis yet: replicate without it")
    axes = [_flat(mesh, names) for names in (dims.replicate_names, dims.shard_names) if names]
    return DataParallel(axes[0] if len(axes) == 1 else DeviceMesh._concatenate(axes), mesh, dims)


def _flat(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


@dataclass(frozen=True)
class Layout:
    """Of one parameter."""

    #: What the group shards on dim 0: the parameter, or this rank's part of it where it is a DTensor.
    local: torch.Tensor
    #: Of the DTensor that users hold.
    sharded: DTensorSpec
    #: Where the parameter is a DTensor of another parallelism too: what it is while its group is unsharded.
    whole: WholeDTensor | None = None


def layout_of(name: str, param: nn.Parameter, ranks: DataParallel) -> Layout:
    """ValueError for a parameter that does not lie as ``ranks`` asks for. Not collective."""
    if isinstance(param, DTensor):
        spec = param._spec
        if spec.mesh.device_type != ranks.mesh.device_type:
            raise ValueError(
                "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
                f"{spec.mesh.device_type} for DTensor and {ranks.mesh.device_type} for FSDP: parameter '{name}'"
            )
        if any(placement.is_partial() for placement in spec.placements):
            raise ValueError(f"fully_shard cannot shard parameter '{name}', which lies as {spec.placements}")
        return (_on_other_axes if ranks.full is None else _on_the_full_mesh)(name, param, ranks)
    if ranks.full is not None:
        raise ValueError(
            f"With dp_mesh_dims all parameters must be DTensors on {ranks.full}; '{name}' is a plain tensor: "
            "distribute it first"
        )
    placements = (*_replicas(ranks.mesh), Shard(0))
    whole = torch.empty(param.shape, dtype=param.dtype, device="meta")
    return Layout(param, DTensorSpec(ranks.mesh, placements, TensorMeta(whole.shape, whole.stride(), whole.dtype)))


def _replicas(mesh: DeviceMesh) -> tuple[Placement, ...]:
    return (Replicate(),) * (mesh.ndim - 1)


def _shard(pieces: int) -> Placement:
    """Of dim 0 of a tensor that axes to the right cut into ``pieces`` already: rows of each piece."""
    return _StridedShard(0, split_factor=pieces) if pieces > 1 else Shard(0)


def _on_other_axes(name: str, param: DTensor, ranks: DataParallel) -> Layout:
    """``param`` lies on a mesh beside the data-parallel one, tensor parallelism's. It shows on both."""
    spec = param._spec
    try:
        mesh = DeviceMesh._concatenate([ranks.mesh, spec.mesh])
    except RuntimeError as error:
        raise ValueError(
            f"parameter '{name}' is a DTensor on {spec.mesh}, which is not part of one mesh with {ranks.mesh}: take "
            "both from one DeviceMesh"
        ) from error
    placements = (*_replicas(ranks.mesh), _shard(spec.num_shards_map[0]), *spec.placements)
    return Layout(param._local_tensor, DTensorSpec(mesh, placements, spec.tensor_meta), WholeDTensor(spec))


def _on_the_full_mesh(name: str, param: DTensor, ranks: DataParallel) -> Layout:
    """``param`` lies on all axes, replicated on the data-parallel ones. Several shard axes show as one."""
    spec, dims, names = param._spec, ranks.dims, ranks.full.mesh_dim_names
    if spec.mesh != ranks.full:
        raise ValueError(
            f"parameter '{name}' is a DTensor on {spec.mesh}; with dp_mesh_dims it must be on {ranks.full}"
        )
    data_axes = frozenset(names.index(axis) for axis in (*dims.replicate_names, *dims.shard_names))
    for i in data_axes:
        if not spec.placements[i].is_replicate():
            raise ValueError(
                f"Expected Replicate() on the data-parallel axis '{names[i]}' but got {spec.placements[i]}: '{name}'"
            )
    meshes, placements = [], []
    for i, axis in enumerate(names):
        inner = zip(spec.mesh.shape[i + 1 :], spec.placements[i + 1 :])
        pieces = math.prod(size for size, each in inner if isinstance(each, (Shard, _StridedShard)) and each.dim == 0)
        if len(dims.shard_names) == 1 or i not in data_axes:
            meshes.append(spec.mesh[axis])
            placements.append(_shard(pieces) if axis in dims.shard_names else spec.placements[i])
        elif axis == dims.shard_names[0]:
            meshes.append(ranks.mesh)
            placements += [*_replicas(ranks.mesh), _shard(pieces)]
    mesh = spec.mesh if len(dims.shard_names) == 1 else DeviceMesh._concatenate(meshes)
    sharded = DTensorSpec(mesh, tuple(placements), spec.tensor_meta)
    return Layout(param._local_tensor, sharded, WholeDTensor(spec, data_axes))


class WholeDTensor:
    """The DTensor that stands in the module for an unsharded leaf, this rank's part of a parameter."""

    def __init__(self, spec: DTensorSpec, data_axes: frozenset[int] = frozenset()):
        self._spec = spec
        self._data_axes = data_axes  # of the mesh: over which the engine reduces

    def show(self, leaf: torch.Tensor) -> DTensor:
        """A DTensor over the leaf's bytes, there or not. Its gradient arrives at the leaf."""
        shown = _Show.apply(leaf, self._of(leaf), self._data_axes)
        shown._is_param = True
        return shown

    def gradient(self, local: torch.Tensor) -> DTensor:
        """What arrived at the leaf, for hooks of the parameter."""
        spec = self._of(local)
        placements = tuple(Partial() if i in self._data_axes else each for i, each in enumerate(spec.placements))
        return DTensor(local, DTensorSpec(spec.mesh, placements, spec.tensor_meta), requires_grad=False)

    def local_gradient(self, gradient: DTensor) -> torch.Tensor:
        """:meth:`gradient`'s inverse, for what a hook returned."""
        return _local_gradient(gradient, self._spec.placements, self._data_axes)

    def _of(self, local: torch.Tensor) -> DTensorSpec:
        return replace(self._spec, tensor_meta=self._spec.tensor_meta._replace(dtype=local.dtype))


class _Show(torch.autograd.Function):
    # Not DTensor.from_local: a view would read the leaf, and on data-parallel axes gradients would be reduced.
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, spec: DTensorSpec, data_axes: frozenset[int]) -> DTensor:
        ctx.placements, ctx.data_axes = spec.placements, data_axes
        ctx.set_materialize_grads(False)
        return DTensor(leaf.data, spec, requires_grad=leaf.requires_grad)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[torch.Tensor | None, None, None]:
        if gradient is None:
            return None, None, None
        return _local_gradient(gradient, ctx.placements, ctx.data_axes), None, None


def _local_gradient(gradient: DTensor, placements: tuple[Placement, ...], data_axes: frozenset[int]) -> torch.Tensor:
    """This rank's part of a gradient that lies as its parameter, but on data-parallel axes as one of the terms that the
    engine sums up."""
    wanted = tuple(
        came if i in data_axes and came.is_partial("sum") else each
        for i, (came, each) in enumerate(zip(gradient.placements, placements))
    )
    if gradient.placements != wanted:
        gradient = gradient.redistribute(placements=wanted)
    local = gradient.to_local()
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    # DTensor operators may have summed up over a data-parallel axis already. Counted on every rank, such a gradient
    # would weigh more than those of other parameters.
    terms = math.prod(gradient.device_mesh.size(i) for i in data_axes if wanted[i].is_replicate())
    return local if terms == 1 else local / terms
