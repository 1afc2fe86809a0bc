"""State dicts of wrapped modules: whole tensors, rows of each, or what a rank holds; under the names of the unwrapped
model. The wrappers' hooks turn what torch collects into that, and what is loaded back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp._common_utils import FSDP_PREFIX, clean_tensor_name
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _replace_by_prefix

from .._placement import DataParallel, layout_of
from ._ranks import Ranks
from ._unit import FLAT_PARAM, Piece, Unit


class Names:
    """Names below a wrapper, as they would be without wrappers."""

    def __init__(self, wrapped: nn.Module):
        self._paths: dict[nn.Module, list[str]] = {}
        for path, module in wrapped.named_modules(remove_duplicate=False):
            self._paths.setdefault(module, []).append(path)

    def of(self, module: nn.Module, name: str) -> Iterator[str]:
        for path in self._paths.get(module, ()):
            yield clean_tensor_name(f"{path}.{name}" if path else name)

    def of_piece(self, piece: Piece) -> list[str]:
        return [full for module, name in piece.modules() for full in self.of(module, name)]


def attach(wrapper: Any) -> None:
    wrapper.register_state_dict_post_hook(_after_state_dict)
    wrapper.register_load_state_dict_pre_hook(_before_load)
    wrapper.register_load_state_dict_post_hook(_after_load)


def _after_state_dict(wrapper: Any, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    _replace_by_prefix(state_dict, f"{prefix}{FSDP_PREFIX}", prefix)
    unit: Unit = wrapper._unit
    unit.adopt()
    kind, config = wrapper._state_dict_type, wrapper._state_dict_config
    if kind is not StateDictType.FULL_STATE_DICT and unit.pieces and unit.ranks.shard_group is None:
        if dist.is_initialized() and unit.ranks.parts != dist.get_world_size(unit.ranks.group):
            raise RuntimeError(f"{kind} can only be used when parameters are flatten and sharded, not with "
                               f"{unit.strategy}: use FULL_STATE_DICT")
    names = Names(wrapper._fsdp_wrapped_module)
    if kind is StateDictType.LOCAL_STATE_DICT:
        for key, lead, numel in _local(unit, names, prefix):
            state_dict[key] = _stretch(unit, state_dict[key], lead, numel)
        return
    buffers = [(f"{prefix}{full}", before) for module, name, before in wrapper._buffers_of()
               for full in names.of(module, name) if f"{prefix}{full}" in state_dict]
    state_dict.pop(f"{prefix}{FLAT_PARAM}", None)
    wholes = _shown(unit) if unit.summoned else unit.whole()
    drops = getattr(config, "rank0_only", False) and not unit.ranks.is_first
    for piece, whole in zip(unit.pieces, wholes):
        value = whole if kind is StateDictType.FULL_STATE_DICT else rows_of(unit, piece.name, whole)
        for full in names.of_piece(piece):
            if drops:
                state_dict.pop(f"{prefix}{full}", None)
            else:
                state_dict[f"{prefix}{full}"] = value.cpu() if config.offload_to_cpu else value
    for key, before in buffers:
        if drops:
            del state_dict[key]
        else:
            buffer = state_dict[key].to(before) if before is not None else state_dict[key]
            state_dict[key] = buffer.cpu() if config.offload_to_cpu else buffer


def _shown(unit: Unit) -> list[torch.Tensor]:
    return [next(module._parameters[name] for module, name in piece.modules()).detach().clone()
            for piece in unit.pieces]


def _local(unit: Unit, names: Names, prefix: str) -> Iterator[tuple[str, int, int]]:
    """(key, where it begins in the unit's line, elements) of what this rank holds parts of."""
    if unit.flat_param is not None:
        yield f"{prefix}{FLAT_PARAM}", 0, unit.total
        return
    for piece in unit.pieces:
        for full in names.of_piece(piece):
            yield f"{prefix}{full}", piece.lead, piece.numel


def _stretch(unit: Unit, held: torch.Tensor, lead: int, numel: int) -> torch.Tensor | ShardedTensor:
    """What this rank holds of ``numel`` elements, as a part of all of them, 1-D. Without a process group as it is."""
    group = unit.ranks.group
    if group is None:
        return held
    shards = [ShardMetadata([part.start], [len(part)], f"rank:{dist.get_global_rank(group, rank)}/{held.device}")
              for rank, part in enumerate(unit.stretches(lead, numel)) if len(part)]
    properties = TensorProperties(dtype=held.dtype)
    mine = [Shard(held.detach(), shard) for shard in shards if shard.placement.rank() == dist.get_rank()]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        mine, ShardedTensorMetadata(shards, torch.Size([numel]), properties), process_group=group)


def _held_of(value: Any) -> Any:
    """This rank's part of what :func:`_stretch` made."""
    if not isinstance(value, ShardedTensor):
        return value
    shards = value.local_shards()
    return shards[0].tensor if shards else torch.empty(0, dtype=value.dtype)


def rows_of(unit: Unit, name: str, whole: torch.Tensor) -> torch.Tensor:
    """This rank's rows, as a DTensor where the wrapper was given a mesh, else as a ShardedTensor. A scalar stays as it
    is."""
    ranks = unit.ranks
    if whole.dim() == 0:
        return whole
    if ranks.group is None:
        raise RuntimeError("libfsdp: sharded state dicts are for programs with torch.distributed: call "
                           "init_process_group, or use FULL_STATE_DICT")
    if ranks.device_mesh is None:
        return _sharded_rows(whole, ranks)
    spec = layout_of(name, whole, DataParallel(ranks.device_mesh), lambda param: None).sharded
    rows = whole.chunk(ranks.parts)[ranks.part].clone() if ranks.part < len(whole.chunk(ranks.parts)) else (
        whole.new_empty(0, *whole.shape[1:]))
    return DTensor(rows, spec, requires_grad=False)


def _sharded_rows(whole: torch.Tensor, ranks: Ranks) -> ShardedTensor:
    made = _create_chunk_sharded_tensor(whole, ranks.part, ranks.parts, ranks.parts, ranks.group)
    if not made.local_shards():
        # torch.distributed.checkpoint takes a value of which a rank has no part for one that is missing there.
        none = whole.new_empty(0, *whole.shape[1:])
        place = ShardMetadata([len(whole)] + [0] * (whole.dim() - 1), list(none.shape),
                              f"rank:{dist.get_rank()}/{whole.device}")
        made._local_shards.append(Shard(none, place))
    return made


def whole_of(value: Any) -> Any:
    """A value of a state dict of any shape, whole. Collective where ranks hold parts of it."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not isinstance(value, ShardedTensor):
        return value
    group = value._process_group
    shards = value.metadata().shards_metadata
    world = dist.get_world_size(group)
    ranks = [dist.get_group_rank(group, shard.placement.rank()) for shard in shards]
    lengths = [0] * world
    for rank, shard in zip(ranks, shards):
        lengths[rank] += _numel(shard.shard_sizes)
    dtype = value.metadata().tensor_properties.dtype
    mine = torch.zeros(max(lengths), dtype=dtype)
    at = 0
    for local in value.local_shards():
        mine[at : at + local.tensor.numel()] = local.tensor.reshape(-1)
        at += local.tensor.numel()
    parts = torch.empty(world * max(lengths), dtype=dtype)
    dist.all_gather_single(parts.view(torch.uint8), mine.view(torch.uint8), group=group)
    whole = torch.empty(value.size(), dtype=dtype)
    begins = [rank * max(lengths) for rank in range(world)]
    for rank, shard in zip(ranks, shards):
        numel = _numel(shard.shard_sizes)
        place = tuple(slice(offset, offset + size) for offset, size in zip(shard.shard_offsets, shard.shard_sizes))
        whole[place] = parts[begins[rank] : begins[rank] + numel].view(shard.shard_sizes)
        begins[rank] += numel
    return whole


def _numel(sizes: list[int]) -> int:
    return torch.Size(sizes).numel()


def _before_load(wrapper: Any, state_dict: dict[str, Any], prefix: str, _metadata: Any, _strict: bool,
                 missing: list[str], _unexpected: list[str], errors: list[str]) -> None:
    inner = f"{prefix}{FSDP_PREFIX}"
    _replace_by_prefix(state_dict, prefix, inner)
    unit: Unit = wrapper._unit
    names = Names(wrapper._fsdp_wrapped_module)
    if wrapper._state_dict_type is StateDictType.LOCAL_STATE_DICT:
        for key, _, _ in _local(unit, names, inner):
            if key in state_dict:
                state_dict[key] = _held_of(state_dict[key])
        return
    line = unit.line().clone() if unit.flat_param is not None and not unit.summoned else None
    for i, piece in enumerate(unit.pieces):
        keys = [f"{inner}{full}" for full in names.of_piece(piece)]
        there = [key for key in keys if key in state_dict]
        if line is not None:
            missing += [clean_tensor_name(key) for key in keys if key not in state_dict]
        for key in there:
            whole = whole_of(state_dict.pop(key) if line is not None else state_dict[key])
            if unit.summoned:
                state_dict[key] = whole
                continue
            if whole.shape != piece.shape:
                errors.append(f"size mismatch for {clean_tensor_name(key)}: copying a param with shape {whole.shape} "
                              f"from checkpoint, the shape in current model is {piece.shape}.")
                value = unit.group.shard(i)
            else:
                value = piece.cut(whole)
            if line is None:
                state_dict[key] = value
            else:
                unit.stretch(line, piece).copy_(value)
    if line is not None:
        state_dict[f"{inner}{FLAT_PARAM}"] = line


def _after_load(_wrapper: Any, incompatible: Any) -> None:
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [clean_tensor_name(key) for key in keys]
