"""Buffers in low precision."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from .._fully_shard import managed_modules


class CastBuffers:
    """The floating-point buffers of one wrapped module, cast when the model runs."""

    def __init__(self, module: nn.Module, ignored: set[nn.Module], dtype: torch.dtype | None):
        self._dtype = dtype
        self._modules = [weakref.ref(each) for _, each in managed_modules([module]) if each not in ignored]
        #: (module, name) -> the dtype before.
        self._before: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = weakref.WeakKeyDictionary()

    def cast(self) -> None:
        if self._dtype is None:
            return
        for ref in self._modules:
            module = ref()
            for name, buffer in module._buffers.items() if module is not None else ():
                if buffer is not None and buffer.is_floating_point() and buffer.dtype != self._dtype:
                    self._before.setdefault(module, {})[name] = buffer.dtype
                    module._buffers[name] = buffer.to(self._dtype)

    def restore(self) -> None:
        """Gives them the dtypes that they had."""
        for module, dtypes in self._before.items():
            for name, dtype in dtypes.items():
                if (buffer := module._buffers.get(name)) is not None:
                    module._buffers[name] = buffer.to(dtype)

    def dtype_before(self, module: nn.Module, name: str) -> torch.dtype | None:
        return self._before.get(module, {}).get(name)
