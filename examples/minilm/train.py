#!/usr/bin/env python3
"""Fine-tunes MiniLM on pairs from Python's standard library, sharded over the ranks that torchrun started:

    torchrun --nproc-per-node 2 train.py --steps 40
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import model as minilm
import pairs

FIXED = "Sharding a model changes where its weights lie, and nothing that it computes."
HELD_OUT = 128  # pairs that training never sees


def parse_args():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--batch", type=int, default=16, help="pairs a rank and step")
    p.add_argument("--lr", type=float, default=5e-5)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", default="out/minilm", help="folder for the fine-tuned weights")
    return p.parse_args()


def say(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


@torch.no_grad()
def embedding(model, tokenizer):
    """Of the fixed sentence."""
    model.eval()
    return minilm.embed(model, tokenizer, [FIXED])


@torch.no_grad()
def held_out_loss(model, tokenizer, held_out, batch):
    """Mean over the same batches on every rank."""
    model.eval()
    losses = [minilm.loss_of(model, tokenizer, held_out[i:i + batch]) for i in range(0, len(held_out), batch)]
    return (sum(losses) / len(losses)).item()


def require_equal(found, expected, what):
    if not torch.equal(found, expected):
        difference = (found - expected).abs().max().item()
        raise SystemExit(f"rank {dist.get_rank()}: the embedding {what} differs by {difference:.3g}")
    say(f"embedding {what}: equal")


def train(model, tokenizer, data, args):
    """Steps an AdamW; every rank takes its own pairs of each step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=max(1, args.steps // 10))
    model.train()
    begin = time.monotonic()
    for step in range(1, args.steps + 1):
        first = ((step - 1) * world + rank) * args.batch
        loss = minilm.loss_of(model, tokenizer, data[first:first + args.batch])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 5 == 0 or step == args.steps:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            speed = step * world * args.batch / (time.monotonic() - begin)
            say(f"step {step:4d}/{args.steps}  loss {mean.item() / world:.3f}  {speed:.0f} pairs/s")


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed + dist.get_rank())
    data = pairs.read(HELD_OUT + args.steps * args.batch * dist.get_world_size(), args.seed)
    held_out, data = data[:HELD_OUT], data[HELD_OUT:]
    model, tokenizer = minilm.load()
    say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {len(data)} pairs, such as {data[0]}")

    original = embedding(model, tokenizer)
    minilm.shard(model)
    require_equal(embedding(model, tokenizer), original, "of the sharded model against the unsharded one")
    whole = minilm.load()[0]
    torch.nn.init.zeros_(whole.embeddings.word_embeddings.weight)  # nothing of it may remain
    whole.load_state_dict(minilm.gathered(model))
    require_equal(embedding(whole, tokenizer), original, "after gathering against that before sharding")

    before = held_out_loss(model, tokenizer, held_out, args.batch)
    say(f"held-out loss {before:.3f}")
    train(model, tokenizer, data, args)
    after = held_out_loss(model, tokenizer, held_out, args.batch)

    weights = minilm.gathered(model)
    whole.load_state_dict(weights)
    require_equal(embedding(whole, tokenizer), embedding(model, tokenizer), "of the fine-tuned model after gathering")
    if dist.get_rank() == 0:
        os.makedirs(args.out, exist_ok=True)
        save_file(weights, os.path.join(args.out, "model.safetensors"))
    say(f"held-out loss {before:.3f} -> {after:.3f} ({args.steps} steps, {dist.get_world_size()} ranks); "
        f"weights in {args.out}/model.safetensors")
    dist.destroy_process_group()
    if after >= before:
        raise SystemExit("the held-out loss did not fall")


if __name__ == "__main__":
    main()
