"""Tensors within what a forward takes and returns."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with ``fn`` applied to every tensor in it: in lists, tuples (named ones too), dicts, dataclasses and
    packed sequences, nested as they like. What holds no tensor that changed is returned as it is."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, PackedSequence):
        return PackedSequence(fn(value.data), value.batch_sizes, value.sorted_indices, value.unsorted_indices)
    if isinstance(value, dict):
        items = {key: map_tensors(fn, item) for key, item in value.items()}
        if all(items[key] is value[key] for key in items):
            return value
        if type(value) is dict:
            return items
        copied = value.copy()  # an OrderedDict, a defaultdict, a ModelOutput
        for key, item in items.items():
            copied[key] = item
        return copied
    if isinstance(value, (list, tuple)):
        items = [map_tensors(fn, item) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {}
        for field in dataclasses.fields(value):
            old = getattr(value, field.name)
            new = map_tensors(fn, old)
            if new is not old:
                changed[field.name] = new
        return _replaced(value, changed) if changed else value
    return value


def _replaced(value: Any, changed: dict[str, Any]) -> Any:
    # Not dataclasses.replace: that runs __init__ again, and refuses fields that are not its arguments.
    copied = object.__new__(type(value))
    state = dict(value.__dict__) if hasattr(value, "__dict__") else {
        field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    for name, item in {**state, **changed}.items():
        object.__setattr__(copied, name, item)
    return copied


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in ``value``, in order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating-point tensor in it in ``dtype``."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
