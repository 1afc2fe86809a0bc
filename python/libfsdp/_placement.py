"""How a parameter lies: over which ranks it is sharded, along which dim, and as which DTensor it shows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from . import _C
from ._mesh import engine_mesh, engine_ranks
from ._whole_dtensor import WholeDTensor


@dataclass(frozen=True)
class DataParallel:
    """The ranks that one call of fully_shard shards and replicates over."""

    #: One axis (shard) or two (replicate, shard): what the engine communicates over. Without ``shards``: one, replicate.
    mesh: DeviceMesh
    #: With ``dp_mesh_dims``: the mesh that all parameters lie on already, and which of its axes are ``mesh``.
    full: DeviceMesh | None = None
    dims: DataParallelMeshDims | None = None
    #: Whether there is a shard axis.
    shards: bool = True

    @property
    def pieces(self) -> int:
        """How many ranks hold a parameter together."""
        return self.mesh.size(self.mesh.ndim - 1) if self.shards else 1

    @property
    def piece(self) -> int:
        """Which of these parts this rank holds."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1) if self.shards else 0

    def engine_mesh(self) -> _C.Mesh:
        """Opens the engine's mesh. NotImplementedError for a backend that the engine has no channels for."""
        if self.shards:
            return engine_mesh(self.mesh)
        ranks = tuple(self.mesh.mesh.flatten().tolist())
        group = self.mesh.get_group()
        return engine_ranks(self.mesh.device_type, (len(ranks), 1), ("replicate", "shard"), ranks, group)


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
    axes = [_flat(mesh, names) for names in (dims.replicate_names, dims.shard_names) if names]
    ranks = axes[0] if len(axes) == 1 else DeviceMesh._concatenate(axes)
    return DataParallel(ranks, mesh, dims, shards=bool(dims.shard_names))


def _flat(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


@dataclass(frozen=True)
class Layout:
    """Of one parameter."""

    #: What the group shards: the parameter, or this rank's part of it where it is a DTensor.
    local: torch.Tensor
    #: Along which of its dims.
    dim: int
    #: Of the DTensor that users hold.
    sharded: DTensorSpec
    #: Over which it is sharded and replicated: those of the call, or some of its own.
    ranks: DataParallel
    #: Where the parameter is a DTensor of another parallelism too: what it is while its group is unsharded.
    whole: WholeDTensor | None = None


#: What a shard_placement_fn returns.
Choice = Shard | ShardPlacementResult | None


def layout_of(name: str, param: nn.Parameter, ranks: DataParallel, choose: Callable[[nn.Parameter], Choice]) -> Layout:
    """Not collective.

    Raises:
        ValueError: the parameter does not lie as ``ranks`` asks for.
        AssertionError: it does not have the dim that was chosen.
        NotImplementedError: that dim is not the first, and the ranks do not divide its size.
    """
    choice = choose(param)
    if isinstance(choice, ShardPlacementResult):
        if ranks.full is not None:
            raise NotImplementedError(f"libfsdp does not have ShardPlacementResult beside dp_mesh_dims: '{name}'")
        ranks, choice = data_parallel(choice.mesh_info.mesh, None), choice.placement
    dim = _dim(name, param, ranks.pieces, choice)
    if isinstance(param, DTensor):
        spec = param._spec
        if spec.mesh.device_type != ranks.mesh.device_type:
            raise ValueError(
                "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
                f"{spec.mesh.device_type} for DTensor and {ranks.mesh.device_type} for FSDP: parameter '{name}'"
            )
        if any(placement.is_partial() for placement in spec.placements):
            raise ValueError(f"fully_shard cannot shard parameter '{name}', which lies as {spec.placements}")
        return (_on_other_axes if ranks.full is None else _on_the_full_mesh)(name, param, ranks, dim)
    if ranks.full is not None:
        raise ValueError(
            f"With dp_mesh_dims all parameters must be DTensors on {ranks.full}; '{name}' is a plain tensor: "
            "distribute it first"
        )
    placements = (*_replicas(ranks.mesh), Shard(dim))
    whole = torch.empty(param.shape, dtype=param.dtype, device="meta")
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    return Layout(param, dim, DTensorSpec(ranks.mesh, placements, meta), ranks)


def _dim(name: str, param: nn.Parameter, size: int, choice: Shard | None) -> int:
    if choice is None:
        return 0
    if not isinstance(choice, Shard):
        raise ValueError(f"Invalid shard_placement_fn result: {choice} for '{name}'; expected Shard or None")
    local = param._local_tensor if isinstance(param, DTensor) else param
    dim = choice.dim + param.ndim * (choice.dim < 0)
    if not 0 <= dim < param.ndim:
        raise AssertionError(f"Shard dim {choice.dim} is invalid for {param.ndim}D tensor: '{name}' of {param.shape}")
    if dim > 0 and local.size(dim) % size != 0:
        raise NotImplementedError(
            f"FSDP does not support uneven sharding on dim {dim}: '{name}' of {local.size()} over {size} ranks. Only "
            "dim 0 is cut unevenly"
        )
    return dim


def _replicas(mesh: DeviceMesh) -> tuple[Placement, ...]:
    return (Replicate(),) * (mesh.ndim - 1)


def _shard(dim: int, pieces: int) -> Placement:
    """Of a dim that axes to the right cut into ``pieces`` already: rows of each piece."""
    return _StridedShard(dim, split_factor=pieces) if pieces > 1 else Shard(dim)


def _on_other_axes(name: str, param: DTensor, ranks: DataParallel, dim: int) -> Layout:
    """``param`` lies on a mesh beside the data-parallel one, tensor parallelism's. It shows on both."""
    spec = param._spec
    try:
        mesh = DeviceMesh._concatenate([ranks.mesh, spec.mesh])
    except (RuntimeError, TypeError) as error:  # of other roots, overlapping; without names
        raise ValueError(
            f"parameter '{name}' is a DTensor on {spec.mesh}, which is not part of one mesh with {ranks.mesh}: take "
            "both from one DeviceMesh"
        ) from error
    placements = (*_replicas(ranks.mesh), _shard(dim, spec.num_shards_map[dim]), *spec.placements)
    return Layout(param._local_tensor, dim, DTensorSpec(mesh, placements, spec.tensor_meta), ranks, WholeDTensor(spec))


def _on_the_full_mesh(name: str, param: DTensor, ranks: DataParallel, dim: int) -> Layout:
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
        pieces = math.prod(size for size, each in inner if _cuts(each, dim))
        if len(dims.shard_names) <= 1 or i not in data_axes:
            meshes.append(spec.mesh[axis])
            placements.append(_shard(dim, pieces) if axis in dims.shard_names else spec.placements[i])
        elif axis == dims.shard_names[0]:
            meshes.append(ranks.mesh)
            placements += [*_replicas(ranks.mesh), _shard(dim, pieces)]
    mesh = spec.mesh if len(dims.shard_names) <= 1 else DeviceMesh._concatenate(meshes)
    sharded = DTensorSpec(mesh, tuple(placements), spec.tensor_meta)
    return Layout(param._local_tensor, dim, sharded, ranks, WholeDTensor(spec, data_axes))


def _cuts(placement: Placement, dim: int) -> bool:
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim
