"""What ``to_empty()`` leaves without values.

A state dict restores parameters and persistent buffers. Another buffer that was made on the meta device and that nobody
computes anew would hold whatever the memory held, on each rank something else.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_EMPTY = frozenset({torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty,
                    torch.Tensor.new_empty_strided})


class FilledWithNothing(TorchFunctionMode):
    """Inside, tensors that are made without values hold what no model means: NaN, or the largest integer."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return fill_with_nothing(made) if func in _EMPTY and not made.is_meta else made


class EmptiedBuffers:
    """Buffers that hold nothing, as :func:`fill_with_nothing` left them."""

    #: All that have some and were not looked at since.
    waiting: weakref.WeakSet[EmptiedBuffers] = weakref.WeakSet()

    def __init__(self) -> None:
        self._left: list[tuple[str, nn.Module, str, torch.Tensor, int]] = []

    def add(self, path: str, module: nn.Module) -> None:
        """Those of ``module`` itself, which is called ``path`` in errors."""
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and _has_nothing(buffer):
                self._left.append((f"{path}.{name}".lstrip("."), module, name, buffer, _version(buffer)))
                self.waiting.add(self)

    def unfilled(self) -> list[str]:
        """Names of those that the modules still have and that nobody wrote to. The others are forgotten."""
        self._left = [each for each in self._left if _is_unfilled(*each[1:])]
        if not self._left:
            self.waiting.discard(self)
        return [path for path, *_ in self._left]


def fill_with_nothing(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.fill_(_nothing(tensor.dtype))


def _nothing(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _has_nothing(buffer: torch.Tensor) -> bool:
    """By bytes: a write through ``.data`` leaves the version as it was."""
    if buffer.numel() == 0:
        return False
    nothing = torch.full_like(buffer, _nothing(buffer.dtype))
    return torch.equal(*(each.detach().reshape(-1).view(torch.uint8) for each in (buffer, nothing)))


def _is_unfilled(module: nn.Module, name: str, buffer: torch.Tensor, version: int) -> bool:
    return module._buffers.get(name) is buffer and _version(buffer) == version and _has_nothing(buffer)


def _version(buffer: torch.Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version
