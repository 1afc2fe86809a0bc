"""shard_placement_fn, with meshes of parameters' own too, and reshard_after_forward as a number of ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard

from libfsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from models import WIDTH, Block, Stack, batches, loss_of
from parity import assert_close, compare, full, shard_blocks
from ranks import on_ranks


def last_dim(param):
    """Shard(-1) where two ranks divide it."""
    return Shard(-1) if param.shape[-1] % 2 == 0 else None


def placed(model, fully_shard, **options):
    return shard_blocks(model, fully_shard, shard_placement_fn=last_dim, **options)


@on_ranks(2)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_the_last_dim(rank, world, optimizer):
    model = compare(Stack(), rank, world, shard=placed, optimizer=optimizer)
    placements = {param.placements[0] for param in model.parameters()}
    assert placements == {Shard(0), Shard(1)}
    for param in model.parameters():
        assert param.to_local().is_contiguous()
        assert param.to_local().shape[param.placements[0].dim] <= -(-param.shape[param.placements[0].dim] // 2)


@on_ranks(2)
def test_state_dicts(rank, world):
    torch.manual_seed(rank)
    source, target = placed(Stack(), fully_shard), placed(Stack(), fully_shard)
    state = source.state_dict()
    assert state["blocks.0.down.weight"].placements == (Shard(0),) and state["head.weight"].placements == (Shard(1),)
    target.load_state_dict(state, assign=True)
    x = batches(world, 0)[rank]
    torch.testing.assert_close(target(x), source(x))
    with torch.device("meta"):
        model = placed(Stack(), fully_shard)
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    torch.testing.assert_close(model(x), source(x))
    with pytest.raises(ValueError, match="another shape, mesh or placement"):
        shard_blocks(Stack(), fully_shard).load_state_dict(state, assign=True)


@on_ranks(2)
def test_a_gradient_from_before(rank, world):
    model = nn.Linear(4, 4)
    model(torch.ones(1, 4)).sum().backward()
    expected = model.weight.grad.clone()
    fully_shard(model, shard_placement_fn=lambda param: Shard(param.ndim - 1))
    assert model.weight.grad.placements == (Shard(1),) and torch.equal(full(model.weight.grad), expected)


@on_ranks(2)
def test_what_does_not_fit_is_refused():
    cases = [
        (NotImplementedError, "FSDP does not support uneven sharding on dim 1", lambda param: Shard(param.ndim - 1)),
        (AssertionError, "Shard dim 1 is invalid for 1D tensor", lambda param: Shard(1) if param.ndim == 1 else None),
        (ValueError, "Invalid shard_placement_fn result", lambda param: Replicate()),
    ]
    for kind, text, choose in cases:
        for shard in (fully_shard, torch_fully_shard):
            with pytest.raises(kind, match=text):
                shard(nn.Linear(3, 4), shard_placement_fn=choose)


# --- reshard_after_forward=n ------------------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
def test_over_fewer_ranks(rank, world, dim, param_dtype):
    """Backward gathers what forward left; results are the same."""
    options = {"reshard_after_forward": 2,
               "shard_placement_fn": lambda param: Shard(dim) if param.shape == (WIDTH, 8) else None,
               "mp_policy": MixedPrecisionPolicy(param_dtype, torch.float32)}
    tolerance = {} if param_dtype is None else {"rtol": 3e-2, "atol": 3e-2}
    model = compare(Stack(block=lambda: Block(hidden=8)), rank, world, beside_torch=param_dtype is None and dim == 0,
                    shard=lambda model, fully_shard: shard_blocks(model, fully_shard, **options), **tolerance)
    group = model.blocks[0]._get_fsdp_state().group
    gathers = [name for phase, act, name in group.schedule if act == "all-gather" and phase == "backward"]
    assert "blocks.0" in gathers and group.state == "sharded"


@on_ranks(4)
def test_numbers_that_mean_a_flag(rank, world):
    with pytest.warns(UserWarning, match="reshard_after_forward=1"):
        whole = shard_blocks(Stack(), fully_shard, reshard_after_forward=1)
    sharded = shard_blocks(Stack(), fully_shard, reshard_after_forward=4)
    for model, gathered in ((whole, "unsharded"), (sharded, "sharded")):
        model(batches(world, 0)[rank])
        assert {module._get_fsdp_state().group.state for module in model.modules()
                if isinstance(module, FSDPModule)} == {gathered}
    with pytest.raises(ValueError, match="factor of 4"):
        fully_shard(nn.Linear(4, 4), reshard_after_forward=3)


@on_ranks(4)
def test_a_write_between_forward_and_backward_is_seen(rank, world):
    """What was kept is stale then: backward takes the new values, and says so where autograd saved the old ones."""
    model = shard_blocks(Stack(), fully_shard, reshard_after_forward=2)
    x = batches(world, 0)[rank]
    loss = loss_of(model(x))
    with torch.no_grad():
        model.blocks[0].down.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.reset_iter_state()
    model.set_reshard_after_forward(True)
    loss_of(model(x)).backward()
    assert all(isinstance(param.grad, DTensor) for param in model.parameters())


# --- ShardPlacementResult: a mesh of a parameter's own ----------------------------------------------------------------


class Experts(nn.Module):
    """Each pair of ranks has experts of its own."""

    def __init__(self, pair):
        super().__init__()
        self.before = nn.Linear(WIDTH, 5)
        self.experts = nn.Parameter(torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(pair)))
        self.after = nn.Linear(5, WIDTH)

    def forward(self, x):
        h = torch.tanh(self.before(x))
        return x + self.after(torch.einsum("bsi,eij->bsj", h, self.experts))


class ExpertStack(nn.Module):
    def __init__(self, pair):
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(Experts(10 * i + pair) for i in range(3))
        self.own = nn.Parameter(torch.full((5,), float(pair)))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * self.own.mean()


def is_own(name):
    return name.endswith(("experts", "own"))


def expert_meshes(world):
    mesh = dist.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("pair", "within"))
    return mesh["pair", "within"]._flatten("all"), mesh["within"]


def shard_experts(model, shard, whole, own, **options):
    own_params = {param for name, param in model.named_parameters() if is_own(name)}

    def choose(param):
        return ShardPlacementResult(Shard(0), FSDPMeshInfo(own, shard_mesh_dim=0)) if param in own_params else None

    for block in model.blocks:
        shard(block, mesh=whole, shard_placement_fn=choose, **options)
    return shard(model, mesh=whole, shard_placement_fn=choose, **options)


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(4)
def test_parameters_over_ranks_of_their_own(rank, world, reshard):
    """Those of pairs of ranks beside those of all four, in one module and one call."""
    whole, own = expert_meshes(world)
    pair = rank // 2
    plains = [ExpertStack(each) for each in range(world // 2)]
    models = [
        shard_experts(ExpertStack(pair), shard, whole, own, reshard_after_forward=reshard)
        for shard in (fully_shard, torch_fully_shard)
    ]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (*plains, *models)]
    for step in range(3):
        xs = batches(world, step)
        for each, plain in enumerate(plains):  # each pair's own loss; what is shared is averaged below
            (sum(loss_of(plain(xs[r])) for r in (2 * each, 2 * each + 1)) / 2).backward()
        for params in zip(*(plain.named_parameters() for plain in plains)):
            if not is_own(params[0][0]):
                mean = sum(param.grad for _, param in params) / len(params)
                for _, param in params:
                    param.grad = mean.clone()
        for model in models:
            loss_of(model(xs[rank])).backward()
        for (name, ours), torchs, plain in zip(
            models[0].named_parameters(), models[1].parameters(), plains[pair].parameters()
        ):
            assert ours._spec == torchs._spec, name
            assert_close(ours.grad.full_tensor(), torchs.grad.full_tensor(), name)
            assert_close(ours.grad.full_tensor(), plain.grad, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    group = fully_shard.state(models[0]).group
    assert group.stats["unsharded_param_bytes"] == 0
    groups = [line for line in group.schedule if line[0] == "forward" and line[1] == "all-gather"]
    # The root's own parameter over pairs, and a group of each block's for each mesh.
    blocks = [name for i in range(3) for name in (f"blocks.{i}", f"blocks.{i} over ('within',)")]
    names = [name for _, _, name in groups]
    assert names == ["(root) over ('within',)", *blocks], names


@on_ranks(4)
def test_settings_reach_parameters_over_ranks_of_their_own(rank, world):
    whole, own = expert_meshes(world)
    model = shard_experts(ExpertStack(rank // 2), fully_shard, whole, own)
    block = model.blocks[0]
    x = batches(world, 0)[rank]
    model(x)
    block.unshard()
    assert block.experts.shape == block.experts.clone().shape and not isinstance(block.experts, DTensor)
    assert not isinstance(block.before.weight, DTensor)
    block.reshard()
    assert isinstance(block.experts, DTensor) and isinstance(block.before.weight, DTensor)
    model.set_requires_gradient_sync(False)
    loss_of(model(x)).backward()
    assert all(param.grad is None for param in model.parameters())
    model.set_requires_gradient_sync(True)
    loss_of(model(x)).backward()
    twice = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
    model.zero_grad()
    loss_of(model(x)).backward()
    for name, param in model.named_parameters():
        assert_close(2 * param.grad.full_tensor(), twice[name], name)
    states = {key: value.full_tensor() for key, value in model.state_dict().items()}
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
    loss_of(model(x)).backward()
    for key, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), states[key])
