"""Checkpoints of models and optimizers that are saved on some ranks and loaded on more, or fewer, by the classic wrapper
and by fully_shard."""

import itertools
import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh

import libfsdp
from libfsdp import fully_shard
from models import Stack
from parity import shard_blocks
from ranks import on_ranks
from test_classic import wrapped
from test_classic_optim_state import trained

WHOLE = StateDictOptions(full_state_dict=True)


def made(style, group):
    """A model over the ranks of a group, and an optimizer; of values that no other one has."""
    mesh = DeviceMesh.from_group(group, "cpu")
    plain = Stack()
    if style == "fully_shard":
        model = shard_blocks(plain, fully_shard, mesh=mesh)
    else:
        model = wrapped(plain, device_mesh=mesh, use_orig_params=style == "classic")
    return model, torch.optim.AdamW(model.parameters(), 0.02)


def leaves(saved):
    """{path: value} of what get_state_dict returned."""
    model, optimizer = saved
    [group] = optimizer["param_groups"]
    state = {f"{name} {key}": value for name, each in optimizer["state"].items() for key, value in each.items()}
    group = {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
    return {**model, **state, **group, "params": sorted(group["params"])}


def from_first(value):
    held = [value]
    dist.broadcast_object_list(held, 0)
    return held[0]


@on_ranks(3)
@pytest.mark.parametrize("kind", ["whole", "sharded"])
@pytest.mark.parametrize("styles", [("classic", "flat"), ("flat", "classic"), ("classic", "fully_shard"), ("fully_shard", "flat")], ids=" to ".join)
def test_between_world_sizes(rank, world, kind, styles):
    groups = {size: dist.new_group(range(size)) for size in range(1, world + 1)}
    folder = from_first(tempfile.mkdtemp() if rank == 0 else None)
    libfsdp.install()
    try:
        for before, after in itertools.permutations(groups, 2):
            expected, path = None, f"{folder}/{before}-{after}"
            if rank < before:
                model, optimizer = made(styles[0], groups[before])
                trained(model, optimizer, rank, before)
                expected = get_state_dict(model, optimizer, options=WHOLE)
                if kind == "sharded":
                    dcp.save(dict(zip("mo", get_state_dict(model, optimizer))), checkpoint_id=path,
                             process_group=groups[before])
            expected = from_first(expected)
            if rank >= after:
                continue
            wanted = leaves(expected)  # now: loading may put DTensors into what it is given
            other, resumed = made(styles[1], groups[after])
            if kind == "sharded":
                parts = dict(zip("mo", get_state_dict(other, resumed)))
                dcp.load(parts, checkpoint_id=path, process_group=groups[after])
                set_state_dict(other, resumed, model_state_dict=parts["m"], optim_state_dict=parts["o"])
            else:
                set_state_dict(other, resumed, model_state_dict=expected[0], optim_state_dict=expected[1],
                               options=WHOLE)
            found = leaves(get_state_dict(other, resumed, options=WHOLE))
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                same = value.equal(found[name]) if isinstance(value, torch.Tensor) else value == found[name]
                assert same, f"{name}, from {before} ranks to {after}"
    finally:
        libfsdp.uninstall()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)


@on_ranks(2)
@pytest.mark.parametrize("before, after", [(1, 2), (2, 1), (2, 2)])
def test_sharded_tensors_of_fewer_rows_than_ranks(rank, world, before, after):
    """Without a mesh, state dicts are of ShardedTensors, of which some ranks hold nothing; torch's own planner must not
    take them for missing."""
    groups = {size: dist.new_group(range(size)) for size in (1, 2)}
    folder = from_first(tempfile.mkdtemp() if rank == 0 else None)
    libfsdp.install()
    try:
        def parts_of(size):
            model = wrapped(Stack(), process_group=groups[size], use_orig_params=True)
            optimizer = torch.optim.AdamW(model.parameters(), 0.02)
            trained(model, optimizer, rank, size)
            return model, optimizer, dict(zip("mo", get_state_dict(model, optimizer)))

        expected = None
        if rank < before:
            model, optimizer, parts = parts_of(before)
            dcp.save(parts, checkpoint_id=folder, process_group=groups[before])
            expected = get_state_dict(model, optimizer, options=WHOLE)
        wanted = leaves(from_first(expected))
        if rank < after:
            model, optimizer, parts = parts_of(after)
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            dcp.load(parts, checkpoint_id=folder, process_group=groups[after])
            set_state_dict(model, optimizer, model_state_dict=parts["m"], optim_state_dict=parts["o"])
            found = leaves(get_state_dict(model, optimizer, options=WHOLE))
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                assert value.equal(found[name]) if isinstance(value, torch.Tensor) else value == found[name], name
    finally:
        libfsdp.uninstall()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)
