"""Parameters that are DTensors of tensor parallelism before they are sharded."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from libfsdp import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from models import WIDTH, batches, loss_of
from parity import assert_close
from ranks import on_ranks


class Mlp(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(hidden) for _ in range(2))
        self.checkpointed = None

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.checkpointed is None else checkpoint(block, x, use_reentrant=self.checkpointed)
        return x


def mesh_of(**axes):
    return dist.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def parallelized(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def sharded(model, shard, mesh, **options):
    for block in model.blocks:
        shard(block, mesh=mesh, **options)
    return shard(model, mesh=mesh, **options)


def train(model, x, steps=3, lr=0.1):
    """(losses, whole gradients of the last step, whole parameters)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        loss = loss_of(model(x))
        loss.backward()
        losses.append(loss.detach())
        gradients = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {name: param.full_tensor() for name, param in model.named_parameters()}


def train_plain(model, inputs, steps=3, lr=0.1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        each = [loss_of(model(x)) for x in inputs]
        (sum(each) / len(each)).backward()
        losses.append([loss.detach() for loss in each])
        gradients = {name: param.grad.clone() for name, param in model.named_parameters()}
        optimizer.step()
    return losses, gradients, dict(model.named_parameters())


def assert_all_close(found, expected, what):
    assert found.keys() == expected.keys()
    for name in found:
        assert_close(found[name], expected[name], f"{what} of {name}")


@on_ranks(4)
@pytest.mark.parametrize("hidden", [8, 6])
@pytest.mark.parametrize("reshard", [True, False])
def test_beside_torch_and_plain(rank, world, reshard, hidden):
    torch.manual_seed(0)
    plain = Stack(hidden)
    mesh = mesh_of(dp=2, tp=2)
    mine, inputs = mesh["dp"].get_local_rank(), batches(2, 0)
    sides = [sharded(parallelized(copy.deepcopy(plain), mesh["tp"]), shard, mesh["dp"], reshard_after_forward=reshard)
             for shard in (fully_shard, torch_fully_shard)]
    for (name, param), (_, torchs) in zip(*(side.named_parameters() for side in sides)):
        assert isinstance(param, DTensor) and isinstance(param, nn.Parameter)
        assert param.placements == torchs.placements and param.device_mesh == torchs.device_mesh, name
        assert torch.equal(param.to_local(), torchs.to_local()) and param.stride() == torchs.stride(), name
    losses, gradients, params = train(sides[0], inputs[mine])
    torch_losses, torch_gradients, torch_params = train(sides[1], inputs[mine])
    assert_close(torch.stack(losses), torch.stack(torch_losses), "losses against torch")
    assert_all_close(gradients, torch_gradients, "gradient against torch")
    assert_all_close(params, torch_params, "value against torch")
    for (name, param), (_, torchs) in zip(*(side.named_parameters() for side in sides)):
        assert_close(param.to_local(), torchs.to_local(), f"rows of {name}")
    if hidden % 4 == 0:  # torch's full_tensor() is wrong where the pieces are uneven
        losses_of_all, plain_gradients, plain_params = train_plain(plain, inputs)
        assert_close(torch.stack(losses), torch.stack([each[mine] for each in losses_of_all]), "losses against plain")
        assert_all_close(gradients, plain_gradients, "gradient against plain")
        assert_all_close(params, plain_params, "value against plain")


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(rank, world, reentrant):
    """A block is run again in backward, with the DTensors of then."""
    torch.manual_seed(0)
    plain = Stack()
    mesh = mesh_of(dp=1, tp=2)
    model = sharded(parallelized(copy.deepcopy(plain), mesh["tp"]), fully_shard, mesh["dp"])
    model.checkpointed = reentrant
    x = batches(1, 0)[0].requires_grad_()
    losses, gradients, params = train(model, x)
    plain_losses, plain_gradients, plain_params = train_plain(plain, [x.detach()])
    assert_close(torch.stack(losses), torch.stack([each[0] for each in plain_losses]), "losses")
    assert_all_close(gradients, plain_gradients, "gradient")
    assert_all_close(params, plain_params, "value")


@on_ranks(2)
def test_frozen_and_thawed_while_unsharded(rank, world):
    mesh = mesh_of(dp=1, tp=2)
    model = sharded(parallelized(Stack(), mesh["tp"]), fully_shard, mesh["dp"], reshard_after_forward=False)
    x = batches(1, 0)[0]
    model.requires_grad_(False)
    for block in model.blocks:
        block.unshard()
        assert isinstance(block.up.weight, DTensor) and block.up.weight.placements == (Shard(0),)
    assert not model(x).requires_grad
    model.requires_grad_(True)
    with torch.inference_mode():
        model(x)
    loss_of(model(x)).backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_mixed_precision_and_hooks(rank, world):
    mesh = mesh_of(dp=1, tp=2)
    model = parallelized(Stack(), mesh["tp"])
    seen = []

    def halve(gradient):
        seen.append((gradient.placements, gradient.shape, gradient.dtype))
        return gradient / 2

    model = sharded(model, fully_shard, mesh["dp"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    x = batches(1, 0)[0]
    loss_of(model(x)).backward()
    expected = model.blocks[0].up.weight.grad.full_tensor()
    model.zero_grad()
    model.blocks[0].up.weight.register_hook(halve)
    loss_of(model(x)).backward()
    assert seen == [((Shard(0),), torch.Size([8, WIDTH]), torch.bfloat16)]
    gradient = model.blocks[0].up.weight.grad
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient.full_tensor(), expected / 2)


@on_ranks(2)
def test_what_does_not_fit_is_refused():
    tp, dp = mesh_of(tp=2), mesh_of(dp=2)
    whole = mesh_of(dp=2, tp=1)
    with pytest.raises(ValueError, match="'up.weight' is a DTensor .* not part of one mesh"):
        fully_shard(parallelized(Stack(), tp).blocks[0], mesh=dp)
    with pytest.raises(ValueError, match="'up.weight' is a DTensor .* not part of one mesh"):
        fully_shard(parallelized(Stack(), tp).blocks[0])
    dims = DataParallelMeshDims(shard="dp")
    with pytest.raises(ValueError, match="must be DTensors.*'up.weight' is a plain tensor"):
        fully_shard(Mlp(), mesh=whole, dp_mesh_dims=dims)
    with pytest.raises(ValueError, match="names the axis 'data'"):
        fully_shard(Mlp(), mesh=whole, dp_mesh_dims=DataParallelMeshDims(shard="data"))
    cut = distribute_module(Mlp(), whole, lambda name, module, mesh: [
        module.register_parameter(key, nn.Parameter(distribute_tensor(param, mesh, [Shard(0), Replicate()])))
        for key, param in module._parameters.items()])
    with pytest.raises(ValueError, match=r"Expected Replicate\(\) on the data-parallel axis 'dp'.*'up.weight'"):
        fully_shard(cut, mesh=whole, dp_mesh_dims=dims)


# --- dp_mesh_dims -----------------------------------------------------------------------------------------------------


def distributed(model, mesh, placements):
    """All parameters on the whole mesh; up and down as a tensor-parallel axis, the last one, wants them."""

    def partition(name, module, mesh):
        for key, param in module._parameters.items():
            placement = {"up": Shard(0), "down": Shard(1) if key == "weight" else Replicate()}.get(name.split(".")[-1])
            module.register_parameter(key, nn.Parameter(distribute_tensor(param, mesh, [*placements, placement])))

    return distribute_module(model, mesh, partition)


@on_ranks(4)
def test_axes_of_the_full_mesh(rank, world):
    torch.manual_seed(0)
    plain = Stack()
    mesh = mesh_of(data=2, model=2)  # torch's own compares it by identity, so names of no other test
    dims = DataParallelMeshDims(shard="data")
    inputs = batches(2, 0)
    x = DTensor.from_local(inputs[mesh["data"].get_local_rank()], mesh, [Shard(0), Replicate()])
    sides = [sharded(distributed(copy.deepcopy(plain), mesh, [Replicate()]), shard, mesh, dp_mesh_dims=dims)
             for shard in (fully_shard, torch_fully_shard)]
    for side in sides:
        side(x).sum().backward()
    (sum(plain(each).sum() for each in inputs) / 2).backward()
    for (name, param), torchs, expected in zip(sides[0].named_parameters(), sides[1].parameters(), plain.parameters()):
        assert param.placements == torchs.placements and param.device_mesh == torchs.device_mesh, name
        assert torch.equal(param.to_local(), torchs.to_local()), name
        # Of this one DTensor sums up over the data axis already, which torch's own takes for one rank's.
        factor = 2 if name == "blocks.1.down.bias" else 1
        assert_close(param.grad.to_local() * factor, torchs.grad.to_local(), f"gradient of {name} against torch")
        assert_close(param.grad, expected.grad, f"gradient of {name}")


@on_ranks(4)
@pytest.mark.parametrize("dims, shape, placements", [
    (DataParallelMeshDims(shard=("a", "b")), (4, 1), (Shard(0),)),
    (DataParallelMeshDims(shard="b", replicate="a"), (2, 2, 1), (Replicate(), Shard(0))),
    (DataParallelMeshDims(replicate=("a", "b")), (2, 2, 1), (Replicate(), Replicate())),
])
def test_several_data_axes(rank, world, dims, shape, placements):
    torch.manual_seed(0)
    plain = Stack()
    mesh = mesh_of(a=2, b=2, tp=1)
    inputs = batches(4, 0)
    x = DTensor.from_local(inputs[rank], mesh, [Shard(0), Shard(0), Replicate()])
    model = sharded(distributed(copy.deepcopy(plain), mesh, [Replicate()] * 2), fully_shard, mesh, dp_mesh_dims=dims)
    model(x).sum().backward()
    (sum(plain(each).sum() for each in inputs) / 4).backward()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters()):
        assert param.placements[:-1] == placements and tuple(param.device_mesh.shape) == shape, name
        assert_close(param, expected, name)
        assert_close(param.grad, expected.grad, f"gradient of {name}")


@on_ranks(4)
def test_replicas_alone(rank, world):
    """Without a shard axis: as torch's shows it, whole on every rank, with averaged gradients."""
    torch.manual_seed(0)
    plain = Stack()
    mesh = mesh_of(replicas=2, parts=2)
    dims = DataParallelMeshDims(replicate="replicas")
    inputs = batches(2, 0)
    x = DTensor.from_local(inputs[mesh["replicas"].get_local_rank()], mesh, [Shard(0), Replicate()])
    sides = [sharded(distributed(copy.deepcopy(plain), mesh, [Replicate()]), shard, mesh, dp_mesh_dims=dims)
             for shard in (fully_shard, torch_fully_shard)]
    model, torchs = sides
    for (name, param), other in zip(model.named_parameters(), torchs.parameters()):
        assert param.placements == other.placements and param.device_mesh == other.device_mesh, name
        assert torch.equal(param.to_local(), other.to_local()), name
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for _ in range(3):
        model(x).sum().backward()
        (sum(plain(each).sum() for each in inputs) / 2).backward()
        for (name, param), expected in zip(model.named_parameters(), plain.parameters()):
            assert_close(param.grad, expected.grad, f"gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(NotImplementedError, match="is not sharded"):
        model.set_custom_all_gather(object())
