"""The norm of gradients of which every rank holds a part."""

from __future__ import annotations

import functools
import math
import warnings

import torch
import torch.distributed as dist
from torch import nn

from ._unit import units_in


@torch.no_grad()
def clip_grad_norm(module: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scales the gradients of ``module`` in place so that their joint norm is at most ``max_norm``; returns the norm
    before, equal on all ranks. Parameters that no wrapper took count once. Collective: one all-reduce for each process
    group that wrappers are sharded over."""
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"libfsdp: clip_grad_norm_: norm_type must be positive (infinity included), got {norm_type}")
    taken: set[nn.Parameter] = set()
    sharded: dict[dist.ProcessGroup | None, list[torch.Tensor]] = {}
    gradients: list[torch.Tensor] = []
    dtypes: list[torch.dtype] = []
    for unit in units_in(module):
        held = sharded.setdefault(unit.ranks.shard_group, [])
        for param in unit.params:
            taken.add(param)
            if param.requires_grad:
                dtypes.append(unit.gradient_dtype)  # not of the gradient itself: not every rank has one
            if param.grad is not None:
                held.append(param.grad)
    plain = sharded.setdefault(None, [])
    for param in module.parameters():
        if param not in taken and param.grad is not None:
            plain.append(param.grad)
            dtypes.append(param.grad.dtype)
    parts = []
    for group, held in sharded.items():
        gradients += held
        part = _joined([torch.linalg.vector_norm(each, order, dtype=torch.float64) for each in held if each.numel()],
                       order)
        if group is not None:
            part = part.pow(order) if order != math.inf else part
            dist.all_reduce(part, dist.ReduceOp.MAX if order == math.inf else dist.ReduceOp.SUM, group)
            part = part.pow(1 / order) if order != math.inf else part
        parts.append(part)
    total = _joined(parts, order)
    factor = (float(max_norm) / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    total = total.to(functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32)
    if not gradients and total == 0:
        warnings.warn(f"Called FSDP.clip_grad_norm_() on rank {module.rank} with no gradients -- returning the total "
                      f"norm in the default dtype {total.dtype}", stacklevel=4)
    return total


def _joined(norms: list[torch.Tensor], order: float) -> torch.Tensor:
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(torch.stack(norms), order)
