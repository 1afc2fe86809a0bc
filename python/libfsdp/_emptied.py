"""What ``to_empty()`` leaves without values.

A state dict restores parameters and persistent buffers. Another buffer that was made on the meta device and that nobody
computes anew would hold whatever the memory held, on each rank something else.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_EMPTY = frozenset({torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty,
                    torch.Tensor.new_empty_strided})


class EmptiedBuffers:
    """Buffers that got memory and no values."""

    #: All that have some and were not looked at since.
    waiting: weakref.WeakSet[EmptiedBuffers] = weakref.WeakSet()

    def __init__(self) -> None:
        self._left: list[tuple[str, nn.Module, str, torch.Tensor, int]] = []

    @contextlib.contextmanager
    def watch(self, module: nn.Module, path: str = "") -> Iterator[None]:
        """Inside, tensors that are made without values hold what no model means: NaN, or the largest integer. Those that
        are buffers of ``module``, called ``path`` in errors, or of one below at the end are remembered. Inside of
        another one's, leaves that to it."""
        if _Filling.of_thread.active:
            yield
            return
        with _Filling() as filling:
            yield
        for where, each in module.named_modules(prefix=path):
            for name, buffer in each._buffers.items():
                made = filling.made.get(id(buffer))
                if made is not None:
                    self._left.append((f"{where}.{name}".lstrip("."), each, name, *made))
                    self.waiting.add(self)

    def unfilled(self) -> list[str]:
        """Names of those that the modules still have and that nobody wrote to. The others are forgotten."""
        self._left = [each for each in self._left if _is_unfilled(*each[1:])]
        if not self._left:
            self.waiting.discard(self)
        return [path for path, *_ in self._left]


class _Filling(TorchFunctionMode):
    class OfThread(threading.local):
        active = False

    of_thread = OfThread()

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[torch.Tensor, int]] = {}  # by id: what was filled, and its version then

    def __enter__(self) -> _Filling:
        self.of_thread.active = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.of_thread.active = False
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _EMPTY and type(made) is torch.Tensor and not made.is_meta and made.numel() > 0:
            with torch.no_grad():
                made.fill_(_nothing(made.dtype))
            self.made[id(made)] = made, _version(made)
        return made


def _nothing(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _is_unfilled(module: nn.Module, name: str, buffer: torch.Tensor, version: int) -> bool:
    return module._buffers.get(name) is buffer and _version(buffer) == version and _has_nothing(buffer)


def _has_nothing(buffer: torch.Tensor) -> bool:
    """By bytes: a write through ``.data`` leaves the version as it was."""
    nothing = torch.full_like(buffer, _nothing(buffer.dtype))
    return torch.equal(*(each.detach().reshape(-1).view(torch.uint8) for each in (buffer, nothing)))


def _version(buffer: torch.Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version
