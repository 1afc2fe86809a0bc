"""transformers' Llama from a small configuration, its own layers as groups, against the unsharded model."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from libfsdp import fully_shard
from parity import assert_close
from ranks import on_ranks

STEPS = 3


def llama(tied):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied, use_cache=False))


def shard(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def batch(step, rank):
    tokens = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(10 * step + rank))
    return {"input_ids": tokens, "labels": tokens}


@on_ranks(2)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("checkpointing", [None, True, False])  # not at all, re-entrant, not re-entrant
def test_trains(rank, world, tied, checkpointing):
    plain = llama(tied)
    model = shard(copy.deepcopy(plain))
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
    plain.train(), model.train()
    for step in range(STEPS):
        losses = [plain(**batch(step, each)).loss for each in range(world)]
        (sum(losses) / world).backward()
        loss = model(**batch(step, rank)).loss
        loss.backward()
        assert_close(loss, losses[rank], f"step {step}: loss")
        for (name, param), expected in zip(model.named_parameters(), plain.parameters()):
            assert_close(param.grad, expected.grad, f"step {step}: gradient of {name}", rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_generates(rank, world):
    """A forward with a key-value cache, which generate() calls on the model again and again."""
    plain = llama(tied=False).eval()
    model = shard(copy.deepcopy(plain))
    prompt = batch(0, 0)["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))
