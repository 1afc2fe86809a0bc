"""libfsdp: fully sharded data parallel training with a C++ engine.

The names of ``torch.distributed.fsdp`` that are here have the same signatures and meaning::

    from libfsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

:func:`install` puts them in the place of torch's own, for libraries that import those themselves.
"""

from . import _version_check  # noqa: F401  (first: explains what an import of _C would only fail at)

from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from . import _C
from ._classic._wrapper import FullyShardedDataParallel
from ._fully_shard import fully_shard
from ._install import install, uninstall
from ._module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from ._paths import cmake_prefix_path
from .sharded_grad_scaler import ShardedGradScaler

__version__: str = _C.version()

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "cmake_prefix_path",
    "fully_shard",
    "install",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "uninstall",
]
