"""Finds optimizers that were built before fully_shard: they hold the old parameters, and their steps change nothing."""

import weakref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

_MARK = "_libfsdp_sharded_as"
_marks = 0  # made so far in this process
_checked: "weakref.WeakKeyDictionary[torch.optim.Optimizer, int]" = weakref.WeakKeyDictionary()


def mark(param: nn.Parameter, name: str) -> None:
    """``param`` is not part of its module any more."""
    global _marks
    if _marks == 0:
        register_optimizer_step_pre_hook(_check)
    _marks += 1
    param.__dict__[_MARK] = name


def owner(param: nn.Parameter) -> str | None:
    """The name that ``param`` was sharded under, if it was."""
    return param.__dict__.get(_MARK)


def _check(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    # Once for each optimizer and set of sharded parameters, not at each step.
    if _checked.get(optimizer) == _marks:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if (name := owner(param)) is not None:
                raise ValueError(
                    f"libfsdp: this {type(optimizer).__name__} was built before fully_shard and holds parameter "
                    f"'{name}' as it was then: its steps would change nothing. Build the optimizer from the parameters "
                    "of the sharded model"
                )
    _checked[optimizer] = _marks
