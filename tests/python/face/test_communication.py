"""Collectives and hooks of the user's own."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from libfsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from models import Stack, batches, loss_of
from parity import assert_close, compare, shard_blocks
from ranks import on_ranks


class Recording:
    """torch's interface of a collective, over the process group, with what it was called with."""

    def __init__(self, asynchronous):
        self.asynchronous = asynchronous
        self.calls = []

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def note(self, output_tensor, input_tensor, group, async_op):
        self.calls.append((output_tensor.dim(), output_tensor.numel(), input_tensor.numel(), output_tensor.dtype,
                           dist.get_world_size(group)))
        return async_op and self.asynchronous


class AllGather(Recording):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        wait_later = self.note(output_tensor, input_tensor, group, async_op)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=wait_later)


class ReduceScatter(Recording):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        assert op == dist.ReduceOp.SUM
        wait_later = self.note(output_tensor, input_tensor, group, async_op)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=wait_later)


@on_ranks(2, 3)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_custom_collectives(rank, world, asynchronous):
    gather, reduce = AllGather(asynchronous), ReduceScatter(asynchronous)

    def prepare(model):
        if isinstance(model, FSDPModule):
            model.blocks[1].set_custom_all_gather(gather)
            model.blocks[1].set_custom_reduce_scatter(reduce)

    model = compare(Stack(), rank, world, beside_torch=False, prepare=prepare)
    longest = torch.tensor(sum(param.to_local().numel() for param in model.blocks[1].parameters()))
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    assert len(reduce.calls) == 3 and len(gather.calls) == 6  # per step: forward and backward
    for dim, output, part, dtype, size in gather.calls:
        assert (dim, output, dtype, size) == (1, part * world, torch.float32, world) and part == longest
    for dim, part, whole, dtype, size in reduce.calls:
        assert (dim, whole, dtype, size) == (1, part * world, torch.float32, world) and part == longest
    model.blocks[1].set_custom_all_gather(None)
    model.blocks[1].set_custom_reduce_scatter(None)
    loss_of(model(batches(world, 0)[rank])).backward()
    assert len(reduce.calls) == 3 and len(gather.calls) == 6


@on_ranks(2)
def test_they_outlive_a_conversion(rank, world):
    """to() makes the group anew; dtypes are those of the wire."""
    gather, reduce = AllGather(True), ReduceScatter(True)
    model = fully_shard(nn.Linear(6, 4), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(reduce)
    model.double()
    model(torch.ones(2, 6)).sum().backward()
    assert [call[3] for call in gather.calls] == [torch.bfloat16] and [call[3] for call in reduce.calls] == [
        torch.float32]
    assert model.weight.grad.dtype == torch.float64 and torch.equal(
        model.weight.grad.full_tensor(), torch.full((4, 6), 2, dtype=torch.float64))


@on_ranks(2)
def test_an_error_in_a_collective_is_its_own(rank, world):
    class Broken(AllGather):
        def __call__(self, *arguments, **more):
            raise KeyError("out of order")

    model = fully_shard(nn.Linear(6, 4))
    model.set_custom_all_gather(Broken(True))
    with pytest.raises(KeyError, match="out of order"):
        model(torch.ones(2, 6))


@on_ranks(4)
def test_a_custom_gather_beside_a_number_is_refused(rank, world):
    model = fully_shard(nn.Linear(6, 4), reshard_after_forward=2)
    with pytest.raises(NotImplementedError, match="number for reshard_after_forward"):
        model.set_custom_all_gather(AllGather(True))


@on_ranks(4)
def test_a_hook_reduces_over_replicas(rank, world):
    """A mesh of one axis, and the other one reduced by the hook: the same as a mesh of two."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    expected = shard_blocks(Stack(), fully_shard, mesh=mesh)
    torch.manual_seed(0)
    model = shard_blocks(Stack(), fully_shard, mesh=mesh["shard"])
    seen = []

    def average(gradients):
        seen.append((gradients.dim(), gradients.dtype))
        dist.all_reduce(gradients, group=mesh.get_group("replicate"))
        gradients /= 2

    for module in (model, *model.blocks):
        module.set_all_reduce_hook(average)
    x = batches(world, 0)[rank]
    for each in (expected, model):
        loss_of(each(x)).backward()
    assert seen == [(1, torch.float32)] * 4
    for (name, param), other in zip(model.named_parameters(), expected.parameters()):
        assert_close(param.grad.to_local(), other.grad.to_local(), name)
    for module in (model, *model.blocks):
        module.set_all_reduce_hook(None)
    loss_of(model(x)).backward()
    assert len(seen) == 4
    with pytest.raises(ValueError, match="mesh of two axes"):
        expected.set_all_reduce_hook(average, stream=object())


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_parameters_in_place(rank, world, param_dtype):
    """Shared memory: nothing is gathered, and an optimizer that was made before goes on."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)

    def prepare(model):
        if isinstance(model, FSDPModule):
            for block in model.blocks:
                block.set_symm_mem_for_comm()
            model.set_symm_mem_for_comm()

    def shard(model, wrap):
        return shard_blocks(model, wrap, mp_policy=policy)

    tolerance = {} if param_dtype is None else {"rtol": 0.05, "atol": 0.02}
    model = compare(Stack(), rank, world, beside_torch=False, prepare=prepare, shard=shard, **tolerance)
    # What one rank loads, the others use.
    state = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    found = model(batches(world, 0)[rank]).float()
    assert_close(found, _halves()(batches(world, 0)[rank]), "after loading", **tolerance)
    # Between steps whole parameters are a copy.
    model.blocks[0].unshard()
    assert all((param == 0.5).all() for param in model.blocks[0].parameters())
    model.blocks[0].reshard()


def _halves():
    model = Stack()
    for param in model.parameters():
        nn.init.constant_(param, 0.5)
    return model


@on_ranks(2)
def test_in_place_beside_custom_collectives(rank, world):
    model = shard_blocks(Stack(), fully_shard)
    model.blocks[0].set_custom_all_gather(AllGather(False))
    with pytest.raises(AssertionError, match="custom collective"):
        model.blocks[0].set_symm_mem_for_comm()
    with pytest.raises(AssertionError, match="custom collective"):
        model.blocks[0].set_allocate_memory_from_process_group_for_comm(True)
    model.blocks[1].set_allocate_memory_from_process_group_for_comm(True)
    model.blocks[1].set_symm_mem_for_comm()
    with pytest.raises(NotImplementedError, match="shared memory"):
        model.blocks[1].set_custom_all_gather(AllGather(False))


@on_ranks(2)
def test_more_reductions_in_flight_and_a_stream_for_hooks(rank, world):
    seen = []

    def prepare(model):
        if isinstance(model, FSDPModule):
            model.set_reduce_scatter_max_input_buffers(3)
            model.blocks[0].set_all_reduce_hook(lambda gradients: seen.append(gradients.numel()), stream=torch.Stream())

    compare(Stack(), rank, world, prepare=prepare, beside_torch=False)
    assert len(seen) == 3
