"""Losses, gradients and parameters against the unsharded model and, where it can, torch's FSDP2 side by side."""

import copy
import sys
from unittest import mock

import pytest
import torch
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor

from libfsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from models import MODELS, WIDTH, Stack, batches, loss_of, make
from parity import assert_close, compare, shard_blocks
from ranks import on_ranks


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_models(rank, world, name):
    compare(make(name), rank, world)


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False, None])
def test_reshard_after_forward(rank, world, reshard):
    compare(Stack(), rank, world,
            shard=lambda model, fully_shard: shard_blocks(model, fully_shard, reshard_after_forward=reshard))


@on_ranks(2)
@pytest.mark.parametrize("foreach, fused", [(True, False), (False, False), (False, True)])
def test_adamw(rank, world, foreach, fused):
    compare(Stack(), rank, world, optimizer=torch.optim.AdamW,
            optimizer_options={"lr": 1e-2, "foreach": foreach, "fused": fused})


@on_ranks(2, 3)
def test_one_group(rank, world):
    compare(Stack(), rank, world, shard=lambda model, fully_shard: fully_shard(model))


@on_ranks(2)
def test_without_a_sharded_root(rank, world):
    def shard(model, fully_shard):
        for module in (*model.blocks, model.head):
            fully_shard(module)
        return model

    model = Stack()
    del model.shift
    model.shift = 0.0
    compare(model, rank, world, shard=shard)


@on_ranks(2)
def test_a_list_is_one_group(rank, world):
    def shard(model, fully_shard):
        fully_shard([model.blocks[0], model.blocks[1]])
        fully_shard([model.blocks[2], model.head])
        return fully_shard(model)

    model = compare(Stack(), rank, world, shard=shard)
    groups = {group for _, act, group in model._get_fsdp_state().group.schedule if act == "all-gather"}
    assert groups == {"blocks.0, blocks.1", "blocks.2, head", "(root)"}


@on_ranks(2)
def test_prefetch(rank, world):
    def prepare(model):
        blocks = list(model.blocks)
        blocks[0].set_modules_to_forward_prefetch(blocks[1:])
        blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])

    compare(Stack(), rank, world, prepare=prepare)


@on_ranks(2)
@pytest.mark.parametrize("pin_memory", [True, False])
def test_state_offloaded_to_the_cpu(rank, world, pin_memory):
    policy = CPUOffloadPolicy(pin_memory=pin_memory)
    model = compare(Stack(), rank, world, beside_torch=False,
                    shard=lambda model, fully_shard: shard_blocks(model, fully_shard, offload_policy=policy))
    assert all(param.to_local().device.type == "cpu" for param in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_state_offloaded_where_it_need_not_be(rank, world, param_dtype):
    """The copies that a device needs, between host memory and itself: on a CPU they change nothing."""
    tolerance = {} if param_dtype is None else {"rtol": 3e-2, "atol": 3e-2}
    policy = MixedPrecisionPolicy(param_dtype, torch.float32)
    with mock.patch.object(sys.modules["libfsdp._fully_shard"], "_offload", lambda policy, device: (device, False)):
        model = compare(Stack(), rank, world, beside_torch=param_dtype is None, **tolerance,
                        shard=lambda model, fully_shard: shard_blocks(model, fully_shard, mp_policy=policy))
    with pytest.raises(NotImplementedError, match="an offload policy"):
        model.set_symm_mem_for_comm()
    before = {name: param.full_tensor() for name, param in model.named_parameters()}
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    model.to(torch.float64)  # makes the group anew
    loss_of(model(batches(world, 0)[rank].double())).backward()
    for name, param in model.named_parameters():
        assert param.grad.dtype == torch.float64 and torch.equal(param.full_tensor(), before[name].double())


@on_ranks(2)
def test_beside_replicate(rank, world):
    """torch's replicate, on what is not sharded, before and after fully_shard."""
    plain = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model = copy.deepcopy(plain)
    replicate(model[0])
    fully_shard([model[1], model[2]])
    fully_shard(model)
    outer = copy.deepcopy(plain)
    fully_shard(outer[1])
    replicate(outer)
    assert [isinstance(layer.weight, DTensor) for layer in model] == [False, True, True]
    assert [isinstance(layer.weight, DTensor) for layer in outer] == [False, True, False]
    inputs = batches(world, 0)
    sum(loss_of(plain(x)) / world for x in inputs).backward()
    for each in (model, outer):
        loss_of(each(inputs[rank])).backward()
        for (name, param), expected in zip(each.named_parameters(), plain.parameters()):
            assert_close(param.grad, expected.grad, name)
