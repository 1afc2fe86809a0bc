"""Whole parameters outside of forward and backward, in their own dtype, for users to read and write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ._unit import FLAT_PARAM, Unit, units_in


@contextmanager
def summoned(units: list[Unit], writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
             ) -> Iterator[None]:
    """The modules of ``units`` show whole parameters. Collective, entering and leaving.

    Raises:
        NotImplementedError: ``writeback`` of parameters that only rank 0 has; gradients of flat parameters.
        AssertionError: inside a forward or a backward, or one of them is summoned already.
    """
    if rank0_only and writeback:
        raise NotImplementedError("writeback=True and rank0_only=True is not supported, as model parameter shapes will "
                                  "be different across ranks, and writing to them can lead to inconsistencies across "
                                  "ranks when the context is exited.")
    if with_grads and (rank0_only or offload_to_cpu):
        raise NotImplementedError("with_grads=True is only supported with rank0_only=False and offload_to_cpu=False")
    for unit in units:
        if with_grads and not unit.use_orig_params:
            raise NotImplementedError("with_grads=True is only supported with use_orig_params=True")
        _assert_may_show(unit)
        unit.adopt()
    with ExitStack() as stack:
        for unit in units:
            stack.enter_context(_one(unit, writeback, rank0_only, offload_to_cpu, with_grads))
        yield


def _assert_may_show(unit: Unit) -> None:
    name = unit.group.name
    if unit.summoned:
        raise AssertionError(f"Cannot manually unshard parameters when already unsharding parameters: '{name}' is "
                             "inside another summon_full_params")
    if unit.group.busy or torch._C._current_graph_task_id() >= 0:
        raise AssertionError(f"Cannot manually unshard parameters during forward/backward: of '{name}'")


@contextmanager
def _one(unit: Unit, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool) -> Iterator[None]:
    wholes = unit.whole()
    gradients = unit.whole_gradients() if with_grads else [None] * len(wholes)
    if offload_to_cpu:
        wholes = [whole.cpu() for whole in wholes]
    shows = not rank0_only or unit.ranks.is_first
    unit.group.lent = True
    if not shows:
        try:
            yield
        finally:
            unit.group.lent = False
        return
    held = [piece.param.grad if piece.param is not None else None for piece in unit.pieces]
    leaves = _show(unit, wholes, gradients)
    try:
        yield
    finally:
        try:
            _write_back(unit, gradients, held, writeback or unit.shows_itself)
        finally:
            _hide(unit, held, leaves)
            unit.group.lent = False


#: A module, the name of a parameter in it, and what it shows there while it is not summoned.
_Leaf = tuple[nn.Module, str, torch.Tensor]


def _show(unit: Unit, wholes: list[torch.Tensor], gradients: list[torch.Tensor | None]) -> list[_Leaf]:
    leaves: list[_Leaf] = []
    for piece, whole, gradient in zip(unit.pieces, wholes, gradients):
        if piece.param is not None:
            piece.param.grad = None
            piece.param.data = whole
            piece.param.grad = gradient
            continue
        param = nn.Parameter(whole, requires_grad=unit.flat_param.requires_grad)
        for module, name in piece.modules():
            leaves.append((module, name, module.__dict__.pop(name)))
            setattr(module, name, param)
    if unit.flat_param is not None:
        del unit.holder._parameters[FLAT_PARAM]
    return leaves


def _write_back(unit: Unit, gradients: list[torch.Tensor | None], held: list[torch.Tensor | None],
                writeback: bool) -> None:
    for i, piece in enumerate(unit.pieces):
        shown = next(module._parameters[name] for module, name in piece.modules())
        if shown.shape != piece.shape:
            raise ValueError(f"libfsdp: parameter '{piece.name}' was replaced inside summon_full_params by one of "
                             f"{list(shown.shape)} where {list(piece.shape)} was expected")
        if not writeback:
            continue
        value, shard = piece.cut(shown), unit.group.shard(i)
        if not value.equal(shard):  # a write makes what is gathered stale
            shard.copy_(value)
        if held[i] is not None and gradients[i] is not None and shown.grad is not None:
            held[i].copy_(piece.cut(shown.grad))


def _hide(unit: Unit, held: list[torch.Tensor | None], leaves: list[_Leaf]) -> None:
    for i, piece in enumerate(unit.pieces):
        if piece.param is None:
            continue
        piece.param.grad = None
        piece.param.data = unit.group.shard(i)
        piece.param.grad = held[i]
        for module, name in piece.modules():
            module._parameters[name] = piece.param
    for module, name, leaf in leaves:
        del module._parameters[name]
        setattr(module, name, leaf)
    if unit.flat_param is not None:
        unit.holder._parameters[FLAT_PARAM] = unit.flat_param


def units_to_summon(module: nn.Module, recurse: bool) -> list[Unit]:
    units = units_in(module)
    return units if recurse else units[:1]
