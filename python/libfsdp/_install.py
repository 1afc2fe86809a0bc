"""Puts libfsdp in the place of torch's own fully_shard."""

import sys
from typing import Any

from torch.distributed.fsdp import _fully_shard as torch_package
from torch.distributed.fsdp._fully_shard import _fully_shard as torch_face

from . import _fully_shard, _module

_OURS: dict[str, Any] = {
    "fully_shard": _fully_shard.fully_shard,
    "FSDPModule": _module.FSDPModule,
    "UnshardHandle": _module.UnshardHandle,
    "register_fsdp_forward_method": _module.register_fsdp_forward_method,
    "share_comm_ctx": _module.share_comm_ctx,
}
_TORCHS: dict[str, Any] = {name: getattr(torch_package, name) for name in _OURS}

#: Where install() put what: (module, the name there, torch's object).
_replaced: list[tuple[Any, str, Any]] = []


def install() -> None:
    """From now on ``torch.distributed.fsdp.fully_shard`` and the names around it are libfsdp's: in torch's modules, and
    in every module that imported them already. Modules that torch's own already sharded stay as they are. A second call
    does nothing, but for modules that were imported since.

    What a library keeps elsewhere (in a default argument, a closure, a class's bases) is not found."""
    ours = {id(original): _OURS[name] for name, original in _TORCHS.items()}
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
        if any(getattr(module, key, None) is mine for mine in _OURS.values()):
            setattr(module, key, original)
    _replaced.clear()


def _is_torchs_implementation(name: str) -> bool:
    # torch's own fully_shard goes on working for what it sharded.
    return name == torch_face.__name__ or name.startswith("torch.distributed.fsdp._fully_shard._fsdp_")
