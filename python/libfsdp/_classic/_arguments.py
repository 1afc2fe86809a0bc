"""What happens to a module before it is wrapped: what to leave alone, and where its values come from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._emptied import EmptiedBuffers
from .._fully_shard import managed_modules
from .._state import state_of


def ignored(module: nn.Module, modules: Iterable[nn.Module] | None, states: Iterable[Any] | None
            ) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """What ``ignored_modules`` and ``ignored_states`` name, and what wrappers inside already ignore.

    Raises:
        ValueError: both are given, one of the modules is wrapped, or states are of neither kind or of both.
        TypeError: ``ignored_modules`` cannot be iterated over.
    """
    if modules is not None and states is not None:
        raise ValueError("Cannot pass both ignored_modules and ignored_states at the same time. Please just pass "
                         "ignored_states.")
    params: list[nn.Parameter] = []
    if states is not None:
        listed = list(states)
        if all(isinstance(each, nn.Module) for each in listed):
            modules = listed
        elif all(isinstance(each, nn.Parameter) for each in listed):
            params = listed
        else:
            raise ValueError("ignored_states expects all nn.Parameter or all nn.Module list elements but got types "
                             f"{_types(listed)}")
    roots = _listed(modules)
    if module in roots:
        warnings.warn("Trying to ignore the top-level module passed into the FSDP constructor itself will result in "
                      "all parameters being ignored and is not well-supported", stacklevel=4)
    found = {child for root in roots for child in root.modules() if state_of(child) is None}
    for each in module.modules():
        found |= getattr(each, "_ignored_modules", None) or set() if state_of(each) is not None else set()
        params += getattr(each, "_ignored_params", None) or set() if state_of(each) is not None else set()
    return found, {*params, *(param for each in found for param in each.parameters())}


def _listed(modules: Iterable[nn.Module] | None) -> list[nn.Module]:
    if modules is None:
        return []
    try:
        listed = list(modules)
    except TypeError as error:
        raise TypeError("`ignored_modules` should be an iterable of `torch.nn.Module`s but got "
                        f"{type(modules)}") from error
    if not all(isinstance(each, nn.Module) for each in listed):
        raise ValueError(f"ignored_modules expects nn.Module list elements but got types {_types(listed)}")
    if any(state_of(each) is not None for each in listed):
        raise ValueError("`ignored_modules` should not include FSDP modules")
    return listed


def _types(listed: list[Any]) -> list[type]:
    return sorted({type(each) for each in listed}, key=repr)


def materialise(module: nn.Module, ignored_modules: set[nn.Module], init: Callable[[nn.Module], None] | None,
                device: torch.device) -> EmptiedBuffers:
    """Gives values to what is on the meta device: by ``init``, called with each module that holds such tensors itself,
    or by ``reset_parameters``. ValueError naming what is still there. Returns the buffers that have memory only."""
    emptied = EmptiedBuffers()
    if init is not None and not callable(init):
        raise ValueError(f"Expected {init} to be callable but got {type(init)}")
    with torch.no_grad():
        for path, each in managed_modules([module]):
            if each in ignored_modules or not any(tensor.is_meta for _, tensor in _own(each)):
                continue
            if init is not None:
                with emptied.watch(each, path):
                    init(each)
                continue
            if not hasattr(each, "reset_parameters"):
                raise ValueError(
                    f"libfsdp: {type(each).__name__} '{path}' has {[name for name, _ in _own(each)]} on the meta "
                    "device and no reset_parameters(): pass param_init_fn, or give it one"
                )
            with emptied.watch(each, path):
                each.to_empty(device=device, recurse=False)
                each.reset_parameters()
    missing = [f"{path}.{name}".lstrip(".") for path, each in managed_modules([module]) if each not in ignored_modules
               for name, tensor in _own(each) if tensor.is_meta]
    if missing:
        raise ValueError(f"libfsdp: param_init_fn left {missing} on the meta device")
    return emptied


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def copy_from_first(module: nn.Module, ignored_params: set[nn.Parameter], groups: Iterable[dist.ProcessGroup | None]
                    ) -> None:
    """The values of the first rank of each group, one after the other, on all ranks of it. Collective."""
    tensors = [tensor for _, each in managed_modules([module]) for _, tensor in _own(each)
               if tensor not in ignored_params]
    with torch.no_grad():
        for group in groups:
            if group is None:
                continue
            for tensor in tensors:
                value = tensor.detach()
                sent = value if value.is_contiguous() else value.contiguous()
                dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
                if sent is not value:
                    value.copy_(sent)
