"""Users' own reductions of gradients, of the signature of torch's register_comm_hook."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ._unit import Unit


def set_comm_hook(unit: Unit, state: Any, hook: Callable[..., None]) -> None:
    if unit.ranks.parts == 1:
        unit.group.set_custom_all_reduce(functools.partial(hook, state))
        return
    unit.group.set_custom_reduce_scatter(CommHook(state, hook), unit.ranks.group)
    unit.group.divide_factor = 1.0


class CommHook:
    """Reduces a unit's gradients by ``hook(state, gradients, output)``; of the interface that groups take. The hook
    averages."""

    def __init__(self, state: Any, hook: Callable[..., None]):
        self._state, self._hook = state, hook

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any,
                 async_op: bool = False) -> None:
        self._hook(self._state, input_tensor, output_tensor)
