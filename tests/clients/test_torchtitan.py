"""torchtitan shards its Llama 3 debug model with libfsdp: beside its run over torch's FSDP2, and the unsharded model."""

import dataclasses
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

import libfsdp
from parity import assert_close, full
from ranks import on_ranks

SEQUENCE, BATCH, STEPS = 16, 2, 3


@contextmanager
def face(name):
    """What torchtitan gets from torch.distributed.fsdp."""
    if name == "torch":
        yield
        return
    libfsdp.install()
    try:
        yield
    finally:
        libfsdp.uninstall()


def config(layers=2):
    """The debug model, with the attention of torchtitan that needs no compiler."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    found = model_registry("debugmodel").model
    found.layers = found.layers[:layers]
    for layer in found.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=SEQUENCE)
    return found


def unsharded():
    torch.manual_seed(0)
    model = config().build()
    model.init_weights(buffer_device=torch.device("cpu"))
    return model


def sharded(name, weights, mesh, **options):
    """As torchtitan's trainer builds it: on the meta device, sharded, then given storage and values."""
    from torchtitan.distributed import fsdp

    with torch.device("meta"):
        model = config().build()
    options = {"param_dtype": torch.float32, "reduce_dtype": torch.float32, "pp_enabled": False, **options}
    with face(name):
        assert fsdp.fully_shard.__module__.startswith(name)
        fsdp.apply_fsdp_to_decoder(model, mesh, **options)
    if name == "torch" and mesh.ndim == 1:  # else it asks Gloo for a scaled sum, which Gloo does not have
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
        for key, param in model.named_parameters():
            param.copy_(distribute_tensor(weights[key].detach(), param.device_mesh, param.placements))
    assert isinstance(model, libfsdp.FSDPModule) == (name == "libfsdp")
    assert all(isinstance(param, DTensor) for param in model.parameters())
    return model


def batch(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(0, 2048, (BATCH, SEQUENCE + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, tokens, labels, world):
    """Over the tokens of all ranks: torchtitan switches the division of gradients off."""
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / (world * labels.numel())


def compare(sides, rank, world, backward, **tolerance):
    """Steps every side; libfsdp's losses, gradients and weights must be those of the others."""
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-3) for name, model in sides.items()}
    losses = []
    for step in range(STEPS):
        found = {name: backward(name, model, step) for name, model in sides.items()}
        losses.append(found["libfsdp"].item())
        for other in sides:
            assert_close(found["libfsdp"], found[other], f"step {step}: loss against {other}", **tolerance)
            expected = dict(sides[other].named_parameters())
            for name, param in sides["libfsdp"].named_parameters():
                assert_close(param.grad, expected[name].grad, f"step {step}: gradient of {name} against {other}",
                             **tolerance)
        for name, model in sides.items():
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizers[name].step()
            optimizers[name].zero_grad()
    for other in sides:
        expected = dict(sides[other].named_parameters())
        for name, param in sides["libfsdp"].named_parameters():
            torch.testing.assert_close(full(param), full(expected[name]), atol=1e-4, rtol=1e-3)
    return losses


@on_ranks(2)
@pytest.mark.parametrize("policy, shape, names", [
    ("default", (2,), ("fsdp",)),
    ("always", (2, 1), ("dp_replicate", "fsdp")),
    ("never", (2,), ("fsdp",)),
])
def test_trains(rank, world, policy, shape, names):
    plain = unsharded()
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    sides = {name: sharded(name, dict(plain.named_parameters()), mesh, reshard_after_forward_policy=policy)
             for name in ("torch", "libfsdp")}
    sides["unsharded"] = plain

    def backward(name, model, step):
        if name == "unsharded":
            loss = [loss_of(model, *batch(step, each), world) for each in range(world)]
            sum(loss).backward()
            return loss[rank].detach()
        loss = loss_of(model, *batch(step, rank), world)
        loss.backward()
        return loss.detach()

    compare(sides, rank, world, backward, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_the_loss_falls_in_bfloat16(rank, world):
    mesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    sides = {name: sharded(name, dict(unsharded().named_parameters()), mesh, param_dtype=torch.bfloat16)
             for name in ("torch", "libfsdp")}

    def backward(name, model, step):
        loss = loss_of(model, *batch(0, rank), world)  # the same tokens each step
        loss.backward()
        return loss.detach()

    losses = compare(sides, rank, world, backward, rtol=1e-3, atol=1e-4)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


@on_ranks(2)
def test_the_chunked_loss(rank, world):
    """torchtitan's own loss calls the head by itself, chunk by chunk, with backwards of its own in between."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

    mesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    sides = {name: sharded(name, dict(unsharded().named_parameters()), mesh) for name in ("torch", "libfsdp")}
    tokens_of_all = torch.tensor(float(world * BATCH * SEQUENCE))

    def backward(name, model, step):
        model._skip_lm_head = True
        chunked = ChunkedLossWrapper(ChunkedLossWrapper.Config(num_chunks=4, loss_fn=CrossEntropyLoss.Config()))
        chunked.set_lm_head(model.lm_head)
        tokens, labels = batch(step, rank)
        with face(name):
            loss, _ = chunked(model(tokens), labels, tokens_of_all)
            loss.backward()
        return loss.detach()

    compare(sides, rank, world, backward, rtol=1e-4, atol=1e-5)
