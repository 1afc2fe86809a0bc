"""Random models beside torch's FSDP2 and the unsharded model: losses, gradients, and parameters after three steps.

``LIBFSDP_RANDOM_MODELS`` says how many; they are the same ones each time.
"""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import libfsdp
from models import WIDTH
from parity import assert_close
from random_models import Model, Spec, prefetch, shard, specs
from ranks import on_ranks

EXAMPLES = int(os.environ.get("LIBFSDP_RANDOM_MODELS", "30"))
STEPS = 3


@given(spec=specs(), world=st.sampled_from([2, 2, 2, 3]))
@settings(max_examples=EXAMPLES, derandomize=True, database=None, deadline=None,
          phases=[Phase.generate], suppress_health_check=list(HealthCheck))
def test_random_models(rank_pool, spec, world):
    try:
        rank_pool.run(world, __name__, "compare_sides", {"spec": spec})
    except BaseException:
        print(f"on {world} ranks: {spec}")
        raise


def batch(spec, step, micro, rank):
    # With a gradient of its own: a re-entrant checkpoint cuts off what comes before it, and a rank may have nothing
    # to go backward through.
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randn(2, WIDTH, generator=generator, dtype=getattr(torch, spec.dtype), requires_grad=True)


def loss_of(spec, model, x):
    return model(x).to(getattr(torch, spec.dtype)).sub(1).square().mean()


def optimizer_of(spec, model):
    parameters = [param for param in model.parameters() if param.requires_grad]
    if not parameters:
        return None
    if spec.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    # With an epsilon that keeps a gradient which is zero but for rounding from becoming a step.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2, fused=spec.optimizer == "adamw fused")


def gradients_sharded(spec, model, step, rank):
    """The losses of this rank's micro-batches."""
    losses = []
    for micro in range(spec.micro_batches):
        model.set_requires_gradient_sync(spec.sync_each or micro == spec.micro_batches - 1)
        losses.append(loss_of(spec, model, batch(spec, step, micro, rank)))
        losses[-1].backward()
    return [loss.detach() for loss in losses]


def gradients_plain(spec, model, step, rank, world):
    losses = [[loss_of(spec, model, batch(spec, step, micro, each)) for each in range(world)]
              for micro in range(spec.micro_batches)]
    (sum(sum(each) for each in losses) / world).backward()
    return [each[rank].detach() for each in losses]


@on_ranks(2)
def compare_sides(rank, world, spec: Spec):
    torch.manual_seed(0)
    plain = Model(spec)
    sides = {"plain": plain, "libfsdp": copy.deepcopy(plain)}
    mesh = dist.init_device_mesh("cpu", tuple(world if axis == "ranks" else 1 for axis in spec.mesh),
                                 mesh_dim_names=tuple(f"axis{i}" for i in range(len(spec.mesh))))
    if spec.torch_has_an_answer:
        sides["torch"] = shard(spec, copy.deepcopy(plain), torch_fully_shard, mesh)
    shard(spec, sides["libfsdp"], libfsdp.fully_shard, mesh)
    for name, model in sides.items():
        if spec.prefetch and name != "plain":
            prefetch(spec, model)
    optimizers = {name: optimizer_of(spec, model) for name, model in sides.items()}
    exact = {"rtol": 1e-9, "atol": 1e-11} if spec.dtype == "float64" else {"rtol": 1e-4, "atol": 1e-6}
    rounded = {"rtol": 5e-2, "atol": 5e-2}  # bfloat16 against the unsharded model, which knows no policy
    for step in range(STEPS):
        losses = {name: gradients_plain(spec, model, step, rank, world) if name == "plain"
                  else gradients_sharded(spec, model, step, rank) for name, model in sides.items()}
        for other in sides:
            tolerance = rounded if spec.policy != "none" else exact
            for micro, (found, expected) in enumerate(zip(losses["libfsdp"], losses[other])):
                assert_close(found, expected, f"step {step}, micro-batch {micro}: loss against {other}", **tolerance)
            compare_parameters(sides, other, f"step {step}", tolerance, gradients=True)
        for name, optimizer in optimizers.items():
            if optimizer is None:
                continue
            if spec.clip:
                torch.nn.utils.clip_grad_norm_(sides[name].parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    for other in sides:
        compare_parameters(sides, other, "end", rounded if spec.policy != "none" else exact, gradients=False)


def compare_parameters(sides, other, when, tolerance, gradients):
    expected = dict(sides[other].named_parameters())
    for name, param in sides["libfsdp"].named_parameters():
        this, that = (param.grad, expected[name].grad) if gradients else (param, expected[name])
        kind = "gradient" if gradients else "parameter"
        assert_close(this, that, f"{when}: {kind} {name} against {other}", **tolerance)
