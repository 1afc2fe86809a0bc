"""Puts libfsdp in the place of torch's own fully_shard."""

import sys
from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import _fully_shard as torch_package
from torch.distributed.fsdp import sharded_grad_scaler as torch_scaler
from torch.distributed.fsdp._fully_shard import _fully_shard as torch_face

from . import _fully_shard, _module, sharded_grad_scaler
from ._classic._wrapper import FullyShardedDataParallel

#: (torch's object, what stands in its place).
_PAIRS: list[tuple[Any, Any]] = [
    (torch_package.fully_shard, _fully_shard.fully_shard),
    (torch_package.FSDPModule, _module.FSDPModule),
    (torch_package.UnshardHandle, _module.UnshardHandle),
    (torch_package.register_fsdp_forward_method, _module.register_fsdp_forward_method),
    (torch_package.share_comm_ctx, _module.share_comm_ctx),
    (TorchFSDP, FullyShardedDataParallel),
    (torch_scaler.ShardedGradScaler, sharded_grad_scaler.ShardedGradScaler),
]

#: Modules of torch that keep torch's own.
_IMPLEMENTATIONS = {torch_face.__name__, "torch.distributed.fsdp._wrap_utils"}

#: Where install() put what: (module, the name there, torch's object).
_replaced: list[tuple[Any, str, Any]] = []


def install() -> None:
    """From now on ``torch.distributed.fsdp.fully_shard`` and the names around it are libfsdp's: in torch's modules, and
    in every module that imported them already. Modules that torch's own already sharded stay as they are. A second call
    does nothing, but for modules that were imported since.

    What a library keeps elsewhere (in a default argument, a closure, a class's bases) is not found."""
    ours = {id(original): mine for original, mine in _PAIRS}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "libfsdp" or _is_torchs_implementation(name):
            continue
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for key, value in list(names.items()):
            if (mine := ours.get(id(value))) is not None:
                names[key] = mine
                _replaced.append((module, key, value))


def uninstall() -> None:
    """Takes :func:`install` back, where nobody put something else since."""
    for module, key, original in _replaced:
        if any(getattr(module, key, None) is mine for _, mine in _PAIRS):
            setattr(module, key, original)
    _replaced.clear()


def _is_torchs_implementation(name: str) -> bool:
    # torch's own goes on working for what it sharded.
    return name in _IMPLEMENTATIONS or name.startswith("torch.distributed.fsdp._fully_shard._fsdp_")
