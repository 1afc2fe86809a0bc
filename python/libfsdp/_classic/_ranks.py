"""Which ranks a wrapped module is sharded and replicated over."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from .. import _C
from .._mesh import alone, engine_ranks

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


@dataclass(frozen=True)
class Ranks:
    """The ranks of one wrapped module, as torch and as the engine know them."""

    #: All data-parallel ranks, or those of the shard axis where the strategy is hybrid; None without torch.distributed.
    group: dist.ProcessGroup | None
    #: The ranks that hold the same shard as this one, where the strategy is hybrid.
    replicas: dist.ProcessGroup | None
    #: What the user gave.
    device_mesh: DeviceMesh | None
    engine: _C.Mesh
    #: Of how many ranks this one holds which part.
    parts: int
    part: int

    @property
    def is_first(self) -> bool:
        """Whether this is the rank for which rank0_only makes an exception; of a hybrid strategy there is one for each
        replica."""
        return self.group is None or dist.get_rank(self.group) == 0

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """Those that the parameters are cut over. None where this rank holds them whole."""
        return self.group if self.parts > 1 else None


def resolve(group: Any, strategy: ShardingStrategy, device_mesh: DeviceMesh | None, auto_wraps: bool,
            device: str) -> Ranks:
    """From the arguments of a wrapper. Collective where groups are made, or described by a pair.

    Raises:
        ValueError: both a process group and a mesh, a strategy that does not fit them, or a hybrid one without either.
    """
    hybrid = strategy in HYBRID
    if device_mesh is not None:
        if group is not None:
            raise ValueError("Cannot pass both process_group and device_mesh at the same time. Please just pass only "
                             "one of them.")
        if not isinstance(device_mesh, DeviceMesh):
            raise ValueError(f"device_mesh must be a torch DeviceMesh, got {type(device_mesh).__name__}")
        if device_mesh.ndim != (2 if hybrid else 1):
            raise ValueError(f"{strategy} expects a device_mesh of {2 if hybrid else 1} dimensions but got "
                             f"{device_mesh}: one axis shards, two replicate and shard")
        if not hybrid:
            return _flat(device_mesh.get_group(0), strategy, device_mesh, device)
        return _hybrid(device_mesh.get_group(1), device_mesh.get_group(0), device_mesh.mesh.tolist(), device_mesh,
                       device)
    if not dist.is_initialized():
        given = group if isinstance(group, tuple) else (group,)
        if any(each is not None and each.size() > 1 for each in given):
            raise ValueError("a process group of several ranks was given, but torch.distributed is not initialised")
        return Ranks(None, None, None, alone(device), 1, 0)
    if not hybrid:
        if isinstance(group, tuple):
            raise ValueError(f"a pair of process groups is for hybrid strategies, not for {strategy}")
        return _flat(group if group is not None else dist.group.WORLD, strategy, None, device)
    if group is None:
        if not auto_wraps:
            raise ValueError("Manual wrapping with HYBRID_SHARD requires explicit specification of process group or "
                             "device_mesh.")
        group = _by_host()
    if not (isinstance(group, tuple) and len(group) == 2):
        raise ValueError(f"Expected process_group to be passed in as a pair (shard, replicate) with {strategy}, got "
                         f"{type(group).__name__}")
    shard, replicas = group
    rows: list[Any] = [None] * dist.get_world_size(replicas)
    dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicas)
    return _hybrid(shard, replicas, rows, None, device)


def _flat(group: dist.ProcessGroup, strategy: ShardingStrategy, device_mesh: DeviceMesh | None, device: str) -> Ranks:
    ranks = tuple(dist.get_process_group_ranks(group))
    if strategy is ShardingStrategy.NO_SHARD:
        engine = engine_ranks(device, (len(ranks), 1), ("replicate", "shard"), ranks, group)
        return Ranks(group, None, device_mesh, engine, 1, 0)
    engine = engine_ranks(device, (len(ranks),), ("shard",), ranks, group)
    return Ranks(group, None, device_mesh, engine, len(ranks), dist.get_rank(group))


def _hybrid(shard: dist.ProcessGroup, replicas: dist.ProcessGroup, rows: list[list[int]],
            device_mesh: DeviceMesh | None, device: str) -> Ranks:
    ranks = tuple(rank for row in rows for rank in row)
    engine = engine_ranks(device, (len(rows), len(rows[0])), ("replicate", "shard"), ranks, shard)
    return Ranks(shard, replicas, device_mesh, engine, dist.get_world_size(shard), dist.get_rank(shard))


#: Made once for a default process group.
_host_groups: dict[dist.ProcessGroup, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def _by_host() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Groups (within the host of this rank, across hosts), where a launcher said how many ranks a host has."""
    default = dist.group.WORLD
    if default not in _host_groups:
        world = dist.get_world_size()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if world % local != 0:
            raise ValueError(f"HYBRID_SHARD needs as many ranks on every host: {world} ranks, LOCAL_WORLD_SIZE {local}")
        within, _ = dist.new_subgroups(local)
        across, _ = dist.new_subgroups_by_enumeration([list(range(i, world, local)) for i in range(local)])
        _host_groups.clear()
        _host_groups[default] = within, across
    return _host_groups[default]
