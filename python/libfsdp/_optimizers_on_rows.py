"""Lets torch's elementwise optimizers step the rows that a rank holds, instead of DTensors: the same numbers and the same
state, without DTensor's work for each operator."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.optim.optimizer import register_optimizer_step_post_hook

#: Those of torch.optim that treat every element of a parameter by itself. Each is a module and, in it, the function that
#: its step() calls with lists: parameters, gradients, and the states.
_ELEMENTWISE = ("adadelta", "adagrad", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")

_installed = False


def install() -> None:
    """Wraps those functions, once in a process. What they do for parameters that are not libfsdp's stays as it was."""
    global _installed
    if _installed:
        return
    _installed = True
    register_optimizer_step_post_hook(_note_writes)
    for name in _ELEMENTWISE:
        module = importlib.import_module(f"torch.optim.{name}")
        setattr(module, name, _on_rows(getattr(module, name)))


def _note_writes(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    """Fused kernels, and operators on lists of DTensors, write without counting a version, by which the engine finds out
    that a whole parameter is old, and autograd that a graph is."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    rows = [p._local_tensor for p in params if getattr(p, "_libfsdp_sharded", False) and p.grad is not None]
    if rows:
        torch.autograd.graph.increment_version(rows)


def _on_rows(step: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(step)
    def stepped(params: list[torch.Tensor], *states: Any, **options: Any) -> None:
        specs = [param._spec if getattr(param, "_libfsdp_sharded", False) else None for param in params]
        if not any(specs) or options.get("differentiable") or torch.compiler.is_compiling():
            return step(params, *states, **options)
        lists = [each for each in (params, *states) if isinstance(each, list) and len(each) == len(params)]
        rows = {id(each): _rows(each, specs) for each in lists}
        if any(each is None for each in rows.values()):
            return step(params, *states, **options)
        before = {key: list(each) for key, each in rows.items()}
        step(*(rows.get(id(each), each) for each in (params, *states)), **options)
        for each in lists:  # a state that is made in a first step (a momentum) is put into its list
            for i, (new, old) in enumerate(zip(rows[id(each)], before[id(each)])):
                if new is not old:
                    each[i] = DTensor(new, specs[i], requires_grad=False) if specs[i] is not None else new

    return stepped


def _rows(tensors: list[Any], specs: list[DTensorSpec | None]) -> list[Any] | None:
    """The local tensors of ``tensors``, one a parameter; None if one does not lie as its parameter does."""
    rows = []
    for tensor, spec in zip(tensors, specs):
        if isinstance(tensor, DTensor):
            if spec is None or tensor._spec.placements != spec.placements or tensor._spec.mesh != spec.mesh:
                return None
            rows.append(tensor._local_tensor)
        elif spec is not None and isinstance(tensor, torch.Tensor) and tensor.dim() > 0:
            return None
        else:
            rows.append(tensor)  # of a parameter that is not sharded, a step count, a state that is not there yet
    return rows
