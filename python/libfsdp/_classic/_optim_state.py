"""Optimizer state of wrapped models, under the names of the unwrapped model's parameters.

Each rank's optimizer holds the state of its own stretch of each parameter (or of the line of all). A state dict has it
whole or in rows; loading one cuts it again."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp._common_utils import clean_tensor_name

from .._state import state_of
from ._state_dicts import Names, rows_of, whole_of
from ._unit import Piece, Unit, units_in

#: What an optimizer holds for one parameter.
State = dict[str, Any]


@dataclass(frozen=True, eq=False)
class _Owner:
    """What a parameter of an optimizer stands for: one piece of a unit, all of them, or (no unit) itself."""

    names: tuple[str, ...]
    unit: Unit | None = None
    pieces: tuple[Piece, ...] = ()

    def __str__(self) -> str:
        return self.names[0]

    @property
    def length(self) -> int:
        """How many elements of a unit's this rank holds."""
        return len(self.unit.part) if self.unit.flat_param is not None else self.pieces[0].here_numel


def _owners(model: nn.Module) -> dict[nn.Parameter, _Owner]:
    owners: dict[nn.Parameter, _Owner] = {}
    names = Names(model)
    for path, module in model.named_modules():
        if isinstance(module, TorchFSDP) and state_of(module) is None:
            raise ValueError(f"libfsdp: '{path}' was wrapped by torch's own FullyShardedDataParallel: call the method of "
                             "that class")
    for unit in units_in(model):
        first = {piece: names.of_piece(piece)[0] for piece in unit.pieces}
        params = unit.params
        if unit.flat_param is not None:
            owners[unit.flat_param] = _Owner(tuple(first.values()), unit, tuple(unit.pieces))
        else:
            for param, piece in zip(params, unit.pieces):
                owners[param] = _Owner((first[piece],), unit, (piece,))
    for name, param in model.named_parameters():
        owners.setdefault(param, _Owner((clean_tensor_name(name),)))
    return owners


class _Keys:
    """The keys of an optimizer's state dict: by number, its ``params``, the ``owners`` that they stand for, and their
    ``names`` as the model registers them. ``groups`` has the numbers of each group."""

    def __init__(self, model: nn.Module, groups: Iterable[Iterable[nn.Parameter]]):
        owners = _owners(model)
        self._all = list(owners.values())
        registered = {param: name for name, param in model.named_parameters()}
        self.params: list[nn.Parameter] = []
        self.owners: list[_Owner] = []
        self.names: list[str] = []
        self.groups: list[list[int]] = []
        for params in groups:
            self.groups.append([])
            for param in params:
                number = len(self.owners)
                if param not in owners:
                    raise ValueError(f"libfsdp: the optimizer's parameter {number}, of {list(param.shape)}, is not "
                                     "part of the model: build the optimizer from the parameters of the wrapped model")
                self.groups[-1].append(number)
                self.params.append(param)
                self.owners.append(owners[param])
                self.names.append(registered.get(param, owners[param].names[0]))
        self._by_name = {clean_tensor_name(name): owner for name, owner in zip(self.names, self.owners)}

    def of_units(self) -> dict[Unit, list[_Owner]]:
        """The optimizer's owners by unit, in the order of the model, which is the same on all ranks."""
        listed = set(self.owners)
        units: dict[Unit, list[_Owner]] = {}
        for owner in self._all:
            if owner.unit is not None:
                units.setdefault(owner.unit, []).extend([owner] if owner in listed else [])
        return units

    def owner(self, key: int | str) -> _Owner:
        """Of a number, or of a name, as optimizers that go by names have it."""
        if isinstance(key, int):
            return self.owners[key]
        if (owner := self._by_name.get(clean_tensor_name(key))) is None:
            raise ValueError(f"libfsdp: the optimizer's state dict has '{key}', which is not the name of one of the "
                             "optimizer's parameters")
        return owner


def _groups_of(model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: Any) -> list[list[nn.Parameter]]:
    """The parameters of an optimizer's groups; of one that was built from ``optim_input``, or from all."""
    if optim is not None:
        return [group["params"] for group in optim.param_groups]
    given = list(optim_input) if optim_input is not None else list(model.parameters())
    if any(isinstance(each, dict) for each in given):
        return [list(each["params"]) for each in given]
    return [given]


def warn(old: str, new: str, optim_input: Any = None) -> None:
    """That a method has another name now, and an argument of it no purpose."""
    warnings.warn(f"FullyShardedDataParallel.{old} is being deprecated and is replaced by "
                  f"FullyShardedDataParallel.{new}", FutureWarning, stacklevel=3)
    warn_of(optim_input)


def warn_of(optim_input: Any) -> None:
    if optim_input is not None:
        warnings.warn("The `optim_input` argument is deprecated: pass the optimizer as optim=", FutureWarning,
                      stacklevel=4)


# --- out --------------------------------------------------------------------------------------------------------------


def gathered(model: nn.Module, optim: torch.optim.Optimizer, state_dict: dict[str, Any] | None, *, whole: bool,
             keeps: bool, to_cpu: bool) -> dict[str, Any]:
    """``{"state": {name: ...}, "param_groups": ...}``; with ``whole``, of whole tensors, else of rows. Collective among
    all ranks of the model. Empty on ranks that do not keep it.

    Raises:
        RuntimeError: optimizers of other parameters on other ranks.
        NotImplementedError: state that does not lie as its parameter does.
    """
    keys = _Keys(model, _groups_of(model, optim, None))
    given = state_dict if state_dict is not None else optim.state_dict()
    held = {keys.owner(key): state for key, state in given["state"].items()}
    of_units = keys.of_units()
    kinds = _kinds(of_units, held)
    state: dict[str, State] = {}
    for unit, owners in of_units.items():
        state.update(_unit_state(unit, owners, held, kinds, whole))
    for owner in keys.owners:
        if owner.unit is None and held.get(owner):
            state[owner.names[0]] = {key: value.clone() if isinstance(value, torch.Tensor) else value
                                     for key, value in held[owner].items()}
    if not keeps:
        return {}
    if to_cpu:
        state = {name: {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in each.items()}
                 for name, each in state.items()}
    result: dict[str, Any] = {"state": state}
    if "param_groups" in given:
        result["param_groups"] = [{**{key: value for key, value in group.items() if key != "param_names"},
                                   "params": [name for key in group["params"] for name in keys.owner(key).names]}
                                  for group in given["param_groups"]]
    return result


@dataclass(frozen=True)
class _Misfit:
    """State that cannot be put together, and why."""

    why: str


def _kinds(of_units: dict[Unit, list[_Owner]], held: dict[_Owner, State]) -> dict[_Owner, dict[str, Any]]:
    """What there is for each owner, see :func:`_kind`, on ranks that hold some of it: the state of an empty stretch is
    not there, or not stepped. Collective."""
    by_group: dict[dist.ProcessGroup | None, list[_Owner]] = {}
    for unit, owners in of_units.items():
        by_group.setdefault(unit.ranks.shard_group, []).extend(owners)
    kinds: dict[_Owner, dict[str, Any]] = {}
    for group, owners in by_group.items():
        mine = {owner.names[0]: (owner.length > 0,
                                 {key: _kind(value, owner) for key, value in held.get(owner, {}).items()})
                for owner in owners}
        everyone: list[dict[str, tuple[bool, dict[str, Any]]]] = [mine]
        if group is not None:
            everyone = [{}] * dist.get_world_size(group)
            dist.all_gather_object(everyone, mine, group=group)
        for rank, said in enumerate(everyone):
            if odd := sorted(said.keys() ^ everyone[0].keys()):
                raise RuntimeError(
                    "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's "
                    "optimizer but some ranks are missing some of those states: of ranks 0 and "
                    f"{rank} of the process group, one alone has {odd} in its optimizer")
        for owner in owners:
            kinds[owner] = {}
            for _, said in sorted((said[owner.names[0]] for said in everyone), key=lambda each: not each[0]):
                for key, kind in said.items():
                    if isinstance(kind, _Misfit):
                        raise NotImplementedError(kind.why)
                    kinds[owner].setdefault(key, kind)
    return kinds


def _kind(value: Any, owner: _Owner) -> Any:
    """The dtype of a tensor that lies as the parameter does; other values as they are, alike on all ranks."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if value.dim() == 1 and value.numel() == owner.length:
        return value.dtype
    return _Misfit(
        f"libfsdp: optimizer state of {list(value.shape)} for '{owner}', of which a rank holds {owner.length} "
        "elements, does not lie as the parameter does: this optimizer's state cannot be put together"
    )


def _unit_state(unit: Unit, owners: list[_Owner], held: dict[_Owner, State], kinds: dict[_Owner, dict[str, Any]],
                whole: bool) -> Iterator[tuple[str, State]]:
    found: dict[Piece, State] = {piece: {} for owner in owners for piece in owner.pieces}
    names = {piece: name for owner in owners for piece, name in zip(owner.pieces, owner.names)}
    stretched = sorted({(key, str(kind), kind) for owner in owners for key, kind in kinds[owner].items()
                        if isinstance(kind, torch.dtype)}, key=lambda item: item[:2])
    for key, _, dtype in stretched:
        having = [owner for owner in owners if kinds[owner].get(key) is dtype]
        line = torch.zeros(len(unit.part), dtype=dtype, device=unit.line().device)
        for owner in having:
            value = held.get(owner, {}).get(key)
            if value is None:
                continue
            if unit.flat_param is not None:
                line.copy_(value)
            else:
                unit.stretch(line, owner.pieces[0]).copy_(value)
        wholes = dict(zip(unit.pieces, unit.pieces_of(unit.whole_line(line))))
        for owner in having:
            for piece in owner.pieces:
                found[piece][key] = wholes[piece].clone() if whole else rows_of(unit, names[piece], wholes[piece])
    for owner in owners:
        for piece in owner.pieces:
            for key, kind in kinds[owner].items():
                if not isinstance(kind, torch.dtype):
                    found[piece][key] = kind.clone() if isinstance(kind, torch.Tensor) else kind
    for piece, state in found.items():
        if state:
            yield names[piece], state


# --- in ---------------------------------------------------------------------------------------------------------------


def cut(model: nn.Module, optim: torch.optim.Optimizer | None, state_dict: dict[str, Any], *, optim_input: Any = None,
        by_name: bool = False) -> dict[str, Any]:
    """What ``optim.load_state_dict`` takes on this rank, from :func:`gathered`'s; keyed by names with ``by_name``.
    Without an optimizer, for one that was built from ``optim_input``, or from the model's parameters. Parameters that
    no group of ``state_dict`` names are left out. Collective where values are in rows.

    Raises:
        KeyError: a group of the optimizer of which ``state_dict`` has none.
        ValueError: a group that lies in several of ``state_dict``; parts of a flat parameter that stepped differently.
    """
    keys = _Keys(model, _groups_of(model, optim, optim_input))
    named: list[Any] = keys.names if by_name else list(range(len(keys.owners)))
    saved: dict[str, State] = state_dict["state"]
    state: dict[Any, State] = {}
    # Whatever the order of this rank's optimizer, ranks put rows together in the same one.
    for number, owner in sorted(enumerate(keys.owners), key=lambda item: item[1].names):
        wholes = [{key: whole_of(value) for key, value in saved[name].items()} if name in saved else {}
                  for name in owner.names]
        # An empty stretch gets no gradient, so that its optimizer may have no state of it.
        if owner.unit is None or owner.length > 0 or (optim is not None and optim.state.get(keys.params[number])):
            if cuts := _cut(owner, wholes):
                state[named[number]] = cuts
    result: dict[str, Any] = {"state": {key: state[key] for key in named if key in state}}
    if "param_groups" in state_dict:
        own = optim.param_groups if optim is not None else [{}] * len(keys.groups)
        result["param_groups"] = [_group(numbers, keys, named, group, state_dict["param_groups"])
                                  for numbers, group in zip(keys.groups, own)]
    return result


def _group(numbers: list[int], keys: _Keys, named: list[Any], own: dict[str, Any], saved: list[dict[str, Any]]
           ) -> dict[str, Any]:
    """A group of the optimizer, with the settings that it has in ``saved``."""
    wanted = {name for number in numbers for name in keys.owners[number].names}
    like = [group for group in saved if not wanted.isdisjoint(group["params"])]
    if numbers and not like:
        raise KeyError(f"libfsdp: the optimizer's state dict has no parameter group with '{keys.owners[numbers[0]]}'")
    if len(like) > 1:
        raise ValueError(f"libfsdp: the optimizer's group of '{keys.owners[numbers[0]]}' lies in {len(like)} groups of "
                         "the state dict, whose settings may differ: build it with the groups that it was saved with")
    there = set(like[0]["params"]) if like else set()
    settings = {key: value for key, value in (like[0] if like else own).items() if key not in ("params", "param_names")}
    if "param_names" in own:
        settings["param_names"] = own["param_names"]
    return {**settings, "params": [named[number] for number in numbers
                                   if not there.isdisjoint(keys.owners[number].names)]}


def _cut(owner: _Owner, wholes: list[State]) -> State:
    if owner.unit is None:
        return wholes[0]
    unit, state = owner.unit, {}
    _require_same_steps(owner, wholes)
    for key in dict.fromkeys(key for each in wholes for key in each):
        line = None
        for piece, whole in zip(owner.pieces, wholes):
            if key not in whole:
                continue
            value = whole[key]
            if not isinstance(value, torch.Tensor) or value.shape != piece.shape or _is_count(key, value):
                state[key] = value
            elif unit.flat_param is None:
                state[key] = piece.cut(value).clone()
            else:
                if line is None:
                    line = state[key] = torch.zeros(len(unit.part), dtype=value.dtype, device=unit.line().device)
                unit.stretch(line, piece).copy_(piece.cut(value))
    return state


def _require_same_steps(owner: _Owner, wholes: list[State]) -> None:
    counts = {name: whole.get("step") for name, whole in zip(owner.names, wholes)}
    first, expected = next(iter(counts.items()))
    for name, count in counts.items():
        if (count is None) != (expected is None) or (count is not None and count != expected):
            raise ValueError("All unflattened parameters comprising a single flat parameter must have scalar state "
                             f"with the same value and dtype: '{first}' has step {expected}, '{name}' has {count}")


def _is_count(key: str, value: torch.Tensor) -> bool:
    # A scalar parameter's state looks like the optimizer's counter.
    return value.dim() == 0 and key == "step"


# --- names and numbers ------------------------------------------------------------------------------------------------


def rekeyed(state_dict: dict[str, Any], by_name: bool, model: nn.Module, optim: torch.optim.Optimizer | None,
            optim_input: Any) -> dict[str, Any]:
    """Keys of a whole state dict from numbers to names, or back; ``model`` and ``optim`` are those that the numbers are
    of. ValueError for a key that is neither."""
    names = {param: clean_tensor_name(name) for name, param in model.named_parameters()}
    params = [param for group in _groups_of(model, optim, optim_input) for param in group]
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
