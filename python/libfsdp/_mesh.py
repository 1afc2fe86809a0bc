"""torch's process groups and device meshes, as the engine knows them.

The engine opens channels of its own among the ranks of a mesh, through the process group's store: its messages never
meet those of the user on the wire.
"""

import weakref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from . import _C

#: torch's name of a backend -> the engine's. Where gloo's ranks share a host, their groups take shared memory.
_ENGINES = {"gloo": "auto", "nccl": "nccl", "fake": "fake", "threaded": "inproc"}


class _World:
    """What is open between the ranks of a default process group, for one engine."""

    def __init__(self, engine: str, group: dist.ProcessGroup, device: torch.device):
        _, store = distributed_c10d._world.pg_map[group]
        if store is not None:
            store = dist.PrefixStore("libfsdp", store)
        seconds = _timeout(group, device).total_seconds()
        self._world = _C.World(engine, store, dist.get_rank(), dist.get_world_size(), seconds)
        self._meshes: dict[tuple, _C.Mesh] = {}

    def mesh(self, device: str, shape: tuple[int, ...], names: tuple[str, ...], ranks: tuple[int, ...]) -> _C.Mesh:
        key = (device, shape, names, ranks)
        if key not in self._meshes:
            self._meshes[key] = self._world.mesh(torch.device(device), list(shape), list(names), list(ranks))
        return self._meshes[key]


#: By default process group, so that a group which was destroyed takes its channels along.
_worlds: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, _World]]" = weakref.WeakKeyDictionary()


def _timeout(group: dist.ProcessGroup, device: torch.device):
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return distributed_c10d.default_pg_timeout


def _backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """What ``group`` uses for tensors of this device: ``gloo`` of ``cpu:gloo,cuda:nccl``."""
    name, _ = distributed_c10d._world.pg_map[group]
    for part in str(dist.get_backend_config(group) or name).split(","):
        device, _, backend = part.rpartition(":")
        if device in ("", device_type):
            return backend
    return name


def engine_mesh(mesh: DeviceMesh) -> _C.Mesh:
    """The engine's mesh for torch's. NotImplementedError for a backend that the engine has no channels for."""
    names = mesh.mesh_dim_names or tuple(f"dim_{axis}" for axis in range(mesh.ndim))
    ranks = tuple(mesh.mesh.flatten().tolist())
    return engine_ranks(mesh.device_type, tuple(mesh.shape), names, ranks, mesh.get_group(0))


def engine_ranks(device_type: str, shape: tuple[int, ...], names: tuple[str, ...], ranks: tuple[int, ...],
                 group: dist.ProcessGroup) -> _C.Mesh:
    """A mesh of the engine over ``ranks`` (row-major), this one included, by the backend of ``group``."""
    backend = _backend_of(group, device_type)
    engine = _ENGINES.get(backend)
    if engine is None or engine not in _C.engines():
        known = ", ".join(sorted(name for name, engine in _ENGINES.items() if engine in _C.engines()))
        raise NotImplementedError(
            f"libfsdp has no engine yet for process groups of backend '{backend}' (ranks {list(ranks)}); it works "
            f"with: {known}"
        )
    default = distributed_c10d._get_default_group()
    worlds = _worlds.setdefault(default, {})
    if engine not in worlds:
        worlds[engine] = _World(engine, default, torch.device(device_type))
    return worlds[engine].mesh(device_type, shape, names, ranks)


def alone(device_type: str) -> _C.Mesh:
    """A mesh of this rank alone, for programs without torch.distributed."""
    return _C.World("auto", None, 0, 1, 1.0).mesh(torch.device(device_type), [1], ["shard"], [0])


def default_mesh() -> DeviceMesh:
    """All ranks in one axis, on the accelerator if there is one. Starts torch.distributed if nobody did."""
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    return dist.init_device_mesh(accelerator.type, (dist.get_world_size(),))
