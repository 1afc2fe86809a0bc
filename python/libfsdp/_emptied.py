"""What ``to_empty()`` leaves without values."""

from __future__ import annotations

import torch
from torch import nn


class EmptiedBuffers:
    """The buffers of a module that were just given memory, filled with what no model means: NaN, or the largest
    integer.

    A state dict restores parameters and persistent buffers. Another buffer that nobody computes anew would hold
    whatever the memory held, on each rank something else.
    """

    def __init__(self, module: nn.Module, recurse: bool):
        self._left = []
        for path, each in module.named_modules() if recurse else [("", module)]:
            for name, buffer in each._buffers.items():
                if buffer is None or buffer.is_meta or buffer.numel() == 0:
                    continue
                with torch.no_grad():
                    buffer.fill_(_no_value(buffer.dtype))
                self._left.append((f"{path}.{name}" if path else name, each, name, buffer, _version(buffer)))

    def unfilled(self) -> list[str]:
        """Names of those that the modules still have and that nobody wrote to."""
        return [
            path
            for path, module, name, buffer, version in self._left
            if module._buffers.get(name) is buffer and _version(buffer) == version and _has_no_value(buffer)
        ]


def _no_value(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _has_no_value(buffer: torch.Tensor) -> bool:
    """By bytes: a write through ``.data`` leaves the version as it was."""
    nothing = torch.full_like(buffer, _no_value(buffer.dtype))
    return torch.equal(*(each.detach().reshape(-1).view(torch.uint8) for each in (buffer, nothing)))


def _version(buffer: torch.Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version
