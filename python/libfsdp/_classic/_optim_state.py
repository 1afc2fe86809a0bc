"""Optimizer state of wrapped models, under the names of the unwrapped model's parameters.

Each rank's optimizer holds the state of its own stretch of each parameter (or of the line of all). A state dict has it
whole or in rows; loading one cuts it again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._common_utils import clean_tensor_name

from ._state_dicts import Names, rows_of, whole_of
from ._unit import Piece, Unit, units_in

#: What an optimizer holds for one parameter.
State = dict[str, Any]


@dataclass(frozen=True)
class _Owner:
    """What a parameter of an optimizer stands for: one piece of a unit, all of them, or (no unit) itself."""

    names: tuple[str, ...]
    unit: Unit | None = None
    pieces: tuple[Piece, ...] = ()


def _owners(model: nn.Module) -> dict[nn.Parameter, _Owner]:
    owners: dict[nn.Parameter, _Owner] = {}
    names = Names(model)
    for unit in units_in(model):
        first = {piece: names.of_piece(piece)[0] for piece in unit.pieces}
        if unit.flat_param is not None:
            owners[unit.flat_param] = _Owner(tuple(first.values()), unit, tuple(unit.pieces))
        else:
            for piece in unit.pieces:
                owners[piece.param] = _Owner((first[piece],), unit, (piece,))
    for name, param in model.named_parameters():
        owners.setdefault(param, _Owner((clean_tensor_name(name),)))
    return owners


def _listed(optim: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The optimizer's parameters, in the order of their numbers in its state dict."""
    return [param for group in optim.param_groups for param in group["params"]]


def _owners_of(model: nn.Module, optim: torch.optim.Optimizer) -> list[_Owner]:
    owners = _owners(model)
    for i, param in enumerate(_listed(optim)):
        if param not in owners:
            raise ValueError(f"libfsdp: the optimizer's parameter {i}, of {list(param.shape)}, is not part of the "
                             "model: build the optimizer from the parameters of the wrapped model")
    return [owners[param] for param in _listed(optim)]


def required(optim: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    if optim is None:
        raise ValueError("libfsdp: pass the optimizer as optim=; optim_input is not enough to know its parameters")
    return optim


def warn(old: str, new: str) -> None:
    warnings.warn(f"FullyShardedDataParallel.{old} is being deprecated and is replaced by "
                  f"FullyShardedDataParallel.{new}", FutureWarning, stacklevel=3)


# --- out --------------------------------------------------------------------------------------------------------------


def gathered(model: nn.Module, optim: torch.optim.Optimizer, state_dict: dict[str, Any] | None, *, whole: bool,
             rank0_only: bool, to_cpu: bool) -> dict[str, Any]:
    """``{"state": {name: ...}, "param_groups": ...}``; with ``whole``, of whole tensors, else of rows. Collective among
    all ranks of the model. Empty on all ranks but the first, if ``rank0_only``."""
    owners = _owners_of(model, optim)
    held = (state_dict or optim.state_dict())["state"]
    by_owner = {owner: held.get(i, {}) for i, owner in enumerate(owners)}
    state: dict[str, State] = {}
    for unit in units_in(model):
        mine = [owner for owner in owners if owner.unit is unit]
        for piece_name, found in _unit_state(unit, mine, by_owner, whole):
            state[piece_name] = found
    for owner in owners:
        if owner.unit is None and by_owner[owner]:
            state[owner.names[0]] = {key: value.clone() if isinstance(value, torch.Tensor) else value
                                     for key, value in by_owner[owner].items()}
    if rank0_only and dist.is_initialized() and dist.get_rank() != 0:
        return {}
    if to_cpu:
        state = {name: {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in each.items()}
                 for name, each in state.items()}
    order = [name for owner in owners for name in owner.names]
    groups, at = [], 0
    for group in (state_dict or optim.state_dict())["param_groups"]:
        count = len(group["params"])
        names = [name for owner in owners[at : at + count] for name in owner.names]
        at += count
        groups.append({**group, "params": names})
    return {"state": {name: state[name] for name in order if name in state}, "param_groups": groups}


def _unit_state(unit: Unit, owners: list[_Owner], held: dict[_Owner, State], whole: bool
                ) -> Iterator[tuple[str, State]]:
    # An empty stretch has no state, so that ranks first say what there is.
    mine = {i: {key: _kind(value, owner) for key, value in held[owner].items()} for i, owner in enumerate(owners)}
    everyone: list[Any] = [mine]
    group = unit.ranks.shard_group
    if group is not None:
        everyone = [None] * unit.ranks.parts
        dist.all_gather_object(everyone, mine, group=group)
    kinds: dict[int, dict[str, Any]] = {i: {} for i in range(len(owners))}
    for said in everyone:
        for i, each in said.items():
            for key, kind in each.items():
                kinds[i].setdefault(key, kind)
    found: dict[Piece, State] = {piece: {} for owner in owners for piece in owner.pieces}
    names = {piece: name for owner in owners for piece, name in zip(owner.pieces, owner.names)}
    stretched = sorted({(key, str(kind), kind) for each in kinds.values() for key, kind in each.items()
                        if isinstance(kind, torch.dtype)}, key=lambda item: item[:2])
    for key, _, dtype in stretched:
        having = [owner for i, owner in enumerate(owners) if kinds[i].get(key) is dtype]
        line = torch.zeros(len(unit.part), dtype=dtype, device=unit.line().device)
        for owner in having:
            value = held[owner].get(key)
            if value is None:
                continue
            if owner.unit.flat_param is not None:
                line.copy_(value)
            else:
                unit.stretch(line, owner.pieces[0]).copy_(value)
        wholes = dict(zip(unit.pieces, unit.pieces_of(unit.whole_line(line))))
        for owner in having:
            for piece in owner.pieces:
                found[piece][key] = wholes[piece].clone() if whole else rows_of(unit, names[piece], wholes[piece])
    for i, owner in enumerate(owners):
        for piece in owner.pieces:
            for key, kind in kinds[i].items():
                if not isinstance(kind, torch.dtype):
                    found[piece][key] = kind.clone() if isinstance(kind, torch.Tensor) else kind
    for piece, state in found.items():
        if state:
            yield names[piece], state


def _kind(value: Any, owner: _Owner) -> Any:
    """The dtype of a tensor that lies as the parameter does; other values as they are, alike on all ranks."""
    length = len(owner.unit.part) if owner.unit.flat_param is not None else owner.pieces[0].here_numel
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if value.dim() == 1 and value.numel() == length:
        return value.dtype
    raise NotImplementedError(
        f"libfsdp: optimizer state of {list(value.shape)} for '{owner.names[0]}', of which this rank holds {length} "
        "elements, does not lie as the parameter does: this optimizer's state cannot be put together"
    )


# --- in ---------------------------------------------------------------------------------------------------------------


def cut(model: nn.Module, optim: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """What ``optim.load_state_dict`` takes on this rank, from :func:`gathered`'s. Collective where values are in rows.
    KeyError naming a parameter that has no group in ``state_dict``."""
    owners = _owners_of(model, optim)
    saved: dict[str, State] = state_dict["state"]
    state: dict[int, State] = {}
    for i, owner in enumerate(owners):
        wholes = [{key: whole_of(value) for key, value in saved[name].items()} if name in saved else {}
                  for name in owner.names]
        cuts = _cut(owner, wholes)
        if cuts:
            state[i] = cuts
    groups, at = [], 0
    for group in optim.param_groups:
        numbers = list(range(at, at + len(group["params"])))
        at += len(numbers)
        first = owners[numbers[0]].names[0] if numbers else None
        like = [each for each in state_dict["param_groups"] if first in each["params"]]
        if numbers and not like:
            raise KeyError(f"libfsdp: the optimizer's state dict has no parameter group with '{first}'")
        settings = {key: value for key, value in (like[0] if like else group).items() if key != "params"}
        groups.append({**settings, "params": numbers})
    return {"state": state, "param_groups": groups}


def _cut(owner: _Owner, wholes: list[State]) -> State:
    if owner.unit is None:
        return wholes[0]
    unit, state = owner.unit, {}
    if owner.unit.flat_param is None and owner.pieces[0].here_numel == 0:
        return {}  # as an optimizer has it: an empty stretch gets no gradient
    for key in dict.fromkeys(key for each in wholes for key in each):
        line = None
        for piece, whole in zip(owner.pieces, wholes):
            value = whole.get(key)
            if not isinstance(value, torch.Tensor) or value.shape != piece.shape or _is_count(key, value):
                if value is not None:
                    state[key] = value
                continue
            if unit.flat_param is None:
                state[key] = piece.cut(value).clone()
                continue
            if line is None:
                line = state[key] = torch.zeros(len(unit.part), dtype=value.dtype, device=unit.line().device)
            unit.stretch(line, piece).copy_(piece.cut(value))
    return state


def _is_count(key: str, value: torch.Tensor) -> bool:
    # A scalar parameter's state looks like the optimizer's counter.
    return value.dim() == 0 and key == "step"


# --- names and numbers ------------------------------------------------------------------------------------------------


def rekeyed(state_dict: dict[str, Any], by_name: bool, model: nn.Module, optim: torch.optim.Optimizer | None,
            optim_input: Any) -> dict[str, Any]:
    """Keys of a whole state dict from numbers to names, or back; ``model`` and ``optim`` are those that the numbers are
    of. ValueError for a key that is neither."""
    names = {param: clean_tensor_name(name) for name, param in model.named_parameters()}
    if optim is not None:
        params = _listed(optim)
    else:
        given = list(optim_input) if optim_input is not None else list(model.parameters())
        params = [param for each in given for param in (each["params"] if isinstance(each, dict) else [each])]
    keys: dict[Any, Any] = {i: names[param] for i, param in enumerate(params)}
    if not by_name:
        keys = {name: i for i, name in keys.items()}

    def changed(key: Any) -> Any:
        if key not in keys:
            raise ValueError(f"libfsdp: the optimizer's state dict has '{key}' where one of {list(keys)[:5]}... was "
                             "expected: it is keyed otherwise, or of another model")
        return keys[key]

    return {
        "state": {changed(key): value for key, value in state_dict["state"].items()},
        "param_groups": [{**group, "params": sorted(changed(key) for key in group["params"])}
                         for group in state_dict["param_groups"]],
    }
