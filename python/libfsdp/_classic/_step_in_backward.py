"""Optimizers that step while backward goes on, put on parameters by torch.distributed.optim's
``_apply_optimizer_in_backward``."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.utils.hooks import RemovableHandle

_OPTIMIZERS = "_in_backward_optimizers"


def step_in_backward(params: Iterable[nn.Parameter]) -> list[RemovableHandle]:
    """From now on those of ``params`` that have such optimizers step as soon as their gradient is reduced, and drop
    it."""
    return [param.register_post_accumulate_grad_hook(_step) for param in params if hasattr(param, _OPTIMIZERS)]


def refuse_in_backward(flat_param: nn.Parameter, name: str) -> None:
    """RuntimeError if the flat parameter of wrapper ``name`` has such optimizers."""
    if hasattr(flat_param, _OPTIMIZERS):
        raise RuntimeError("_apply_optimizer_in_backward only supported with use_orig_params=True: the flat parameter "
                           f"of '{name}' has optimizers on it")


def _step(param: nn.Parameter) -> None:
    for optimizer in getattr(param, _OPTIMIZERS):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
