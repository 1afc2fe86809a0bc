"""What a sharded module is: its type, names and methods, beside torch's."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

import libfsdp
from libfsdp import FSDPModule, fully_shard
from models import Block, Stack, batches
from parity import shard_blocks
from ranks import on_ranks


def test_signatures_are_torchs():
    def shape(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert shape(fully_shard) == shape(torch_fully_shard)
    for name, method in inspect.getmembers(TorchFSDPModule, inspect.isfunction):
        if name in ("__new__", "_apply", "__init__"):
            continue
        assert shape(getattr(FSDPModule, name)) == shape(method), name


def test_every_method_of_torchs_class_is_overridden():
    for name in vars(TorchFSDPModule):
        if not name.startswith("__") or name == "__new__":
            assert name in vars(FSDPModule), name


@on_ranks(2)
def test_types_and_names():
    model = shard_blocks(Stack(), fully_shard)
    assert type(model).__name__ == "FSDPStack" and type(model.blocks[0]).__name__ == "FSDPBlock"
    assert type(model.blocks[0]) is type(model.blocks[1])
    for module in (model, *model.blocks):
        assert isinstance(module, FSDPModule) and isinstance(module, TorchFSDPModule)
        assert fully_shard.state(module) is module._get_fsdp_state()
    assert isinstance(model, Stack) and isinstance(model.blocks[0], Block)
    assert not isinstance(model.head, FSDPModule) and fully_shard.state(model.head) is None
    plain = dict(Stack().named_parameters())
    assert list(plain) == [name for name, _ in model.named_parameters()]
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor) and isinstance(param, nn.Parameter) and param.is_leaf
        assert param.placements == (Shard(0),) and param.shape == plain[name].shape
    assert [state.group.name for state in fully_shard.state(model)._state_ctx.all_states] == ["(root)"]
    model(batches(2, 0)[0])
    assert [state.group.name for state in fully_shard.state(model)._state_ctx.all_states] == [
        "(root)", "blocks.0", "blocks.1", "blocks.2"]


@on_ranks(2)
def test_a_slice_of_a_container_is_not_sharded():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    fully_shard(model)
    assert type(model[:2]) is nn.Sequential and len(model[:2]) == 2
    assert model[:2][0] is model[0]


@on_ranks(2)
def test_unshard_and_reshard():
    torch.manual_seed(0)
    plain = nn.Linear(5, 3)
    expected = plain.weight.detach().clone()
    model = fully_shard(nn.Sequential(plain, nn.Linear(3, 3)))
    assert model.unshard() is None
    assert type(model[0].weight) is nn.Parameter
    assert torch.equal(model[0].weight, expected)
    model.reshard()
    assert isinstance(model[0].weight, DTensor)
    handle = model.unshard(async_op=True)
    assert isinstance(handle, libfsdp.UnshardHandle)
    handle.wait()
    handle.wait()
    assert torch.equal(model[0].weight, expected)
    model.state_dict()
    assert isinstance(model[0].weight, DTensor)
    handle = model.unshard(async_op=True)
    model(torch.ones(2, 5)).sum().backward()
    assert isinstance(model[0].weight.grad, DTensor)


@on_ranks(2)
def test_parameters_are_whole_inside_forward_and_sharded_outside():
    class Looks(nn.Linear):
        def forward(self, x):
            assert type(self.weight) is nn.Parameter and self.weight.shape == (3, 5)
            assert self.weight.untyped_storage().nbytes() == 60  # there before any operator reads it
            return super().forward(x)

    model = fully_shard(Looks(5, 3), reshard_after_forward=False)
    model(torch.ones(1, 5)).sum().backward()
    assert isinstance(model.weight, DTensor)


@on_ranks(2)
def test_what_torch_refuses_is_refused_alike():
    linear = fully_shard(nn.Linear(4, 4))
    cases = [
        (AssertionError, lambda shard: shard(linear)),
        (ValueError, lambda shard: shard(nn.ModuleList([nn.Linear(2, 2)]))),
        (ValueError, lambda shard: shard(nn.ParameterList([nn.Parameter(torch.tensor(1.0))]))),
        (ValueError, lambda shard: shard(nn.Linear(4, 4), reshard_after_forward=3)),
        (ValueError, lambda shard: shard(
            nn.Linear(4, 4), mesh=torch.distributed.init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c")))),
        (AssertionError, lambda shard: shard(nn.Linear(4, 4), mesh=torch.distributed.init_device_mesh("cpu", (1, 2)))),
        (ValueError, lambda shard: shard(nn.Linear(4, 4)).set_reshard_after_forward(1)),
        (ValueError, lambda shard: shard(nn.Linear(4, 4)).set_modules_to_forward_prefetch([nn.Linear(1, 1)])),
        (ValueError, lambda shard: shard(nn.Linear(4, 4)).set_modules_to_backward_prefetch([nn.Linear(1, 1)])),
        (TypeError, lambda shard: shard(nn.Linear(4, 4)).set_reduce_scatter_max_input_buffers(True)),
        (ValueError, lambda shard: shard(nn.Linear(4, 4)).set_reduce_scatter_max_input_buffers(0)),
        (AssertionError, lambda shard: copy.deepcopy(shard(nn.Linear(4, 4)))),
        (ValueError, lambda shard: shard(scalar)),
    ]
    scalar = nn.Linear(4, 4)
    scalar.gain = nn.Parameter(torch.tensor(1.0))
    texts = {  # that programs match on, by case
        0: "Each distinct composable distributed API can only be applied to a module once.",
        1: "fully_shard does not support containers that do not implement forward",
        4: "fully_shard expects a 1D or 2D DeviceMesh but got DeviceMesh",
        5: "Please init the 2D mesh for HSDP with mesh_dim_names specified",
        len(cases) - 2: "FSDP does not support deepcopy",
        len(cases) - 1: "Change gain to a 1D tensor with numel equal to 1.",
    }
    twice = torch_fully_shard(nn.Linear(4, 4))
    for i, (kind, case) in enumerate(cases):
        with pytest.raises(kind, match=texts.get(i)):
            case(fully_shard)
        with pytest.raises(kind, match=texts.get(i)):
            case(torch_fully_shard) if i else torch_fully_shard(twice)
    for shard in (fully_shard, torch_fully_shard):
        with pytest.raises(ValueError, match="does not have a method"):
            module = libfsdp if shard is fully_shard else torch.distributed.fsdp
            module.register_fsdp_forward_method(shard(nn.Linear(4, 4)), "generate")


@on_ranks(2)
def test_a_parameter_shared_across_groups_is_refused():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    model = nn.Sequential(a, b)
    fully_shard(a)
    with pytest.raises(ValueError, match="shared|share"):
        fully_shard(model)


@on_ranks(2)
def test_different_models_are_refused_on_every_rank(rank):
    with pytest.raises(ValueError, match="different models"):
        fully_shard(nn.Linear(4, 4 + rank))


@on_ranks(2)
def test_ignored_parameters_stay():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    kept = model[1].weight
    fully_shard(model, ignored_params={kept})
    assert model[1].weight is kept and type(kept) is nn.Parameter
    model(torch.ones(1, 4)).sum().backward()
    assert type(kept.grad) is torch.Tensor and isinstance(model[0].weight.grad, DTensor)


@on_ranks(2)
def test_attributes_of_parameters_are_kept():
    linear = nn.Linear(4, 4)
    linear.weight.sequence_parallel = True
    linear.bias.requires_grad_(False)
    fully_shard(linear)
    assert linear.weight.sequence_parallel and not linear.bias.requires_grad


@on_ranks(2)
def test_an_optimizer_from_before_is_refused():
    model = nn.Linear(4, 4)
    early = torch.optim.Adagrad(model.parameters())
    fully_shard(model)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ValueError, match="built before fully_shard"):
        early.step()
    torch.optim.Adagrad(model.parameters()).step()


@on_ranks(1, 2)
@pytest.mark.parametrize("shape", ["one", "replicate", "shard"])
def test_meshes(world, shape):
    sizes = {"one": (world,), "replicate": (world, 1), "shard": (1, world)}[shape]
    names = ("dp",) if len(sizes) == 1 else ("replicate", "shard")
    mesh = torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=names)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    start = model.weight.detach().clone()
    fully_shard(model, mesh=mesh)
    rank = torch.distributed.get_rank()
    model(torch.full((1, 4), rank + 1.0)).sum().backward()
    assert model.weight.device_mesh == mesh and len(model.weight.placements) == len(sizes)
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), (world + 1) / 2))
    assert torch.equal(model.weight.full_tensor(), start)
