"""Interleaved rounds, and the values that must come out of them."""

import math
from statistics import median

from .rank_group import BenchError


def run_round(group, warmup, steps):
    """Microseconds of a step: the median over the round's steps of the slowest rank's time."""
    replies = group.ask("round", warmup, steps)
    return median(max(times) for times in zip(*(reply["us"] for reply in replies)))


def interleave(groups, rounds, warmup, steps):
    """{side: its time in each round}. One side computes at a time; each round begins with another side."""
    names = list(groups)
    times = {name: [] for name in names}
    for r in range(rounds):
        for name in names[r % len(names):] + names[:r % len(names)]:
            times[name].append(run_round(groups[name], warmup, steps))
    return times


def extra(times, side, base):
    """Median over the rounds of what `side` takes more than `base` did in the same round."""
    return median(s - b for s, b in zip(times[side], times[base]))


def values(group):
    """The joined batch's loss and every parameter's gradient norm, which all ranks must agree on."""
    replies = group.ask("check")
    norms = replies[0]["grad_norms"]
    for rank, reply in enumerate(replies):
        compare(f"{group.name}, rank {rank}: gradient norms", reply["grad_norms"], norms)
    return [sum(reply["loss"] for reply in replies) / len(replies)] + norms


def compare(what, got, expected, tolerance=1e-4):
    """Gradients that cancel to nothing (a key's bias) are judged by the largest norm, not by their own."""
    scale = max(map(abs, expected), default=0.0)
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if not math.isclose(g, e, rel_tol=tolerance, abs_tol=tolerance * 1e-2 * scale):
            raise BenchError(f"{what}: value {i} is {g}, expected {e} (value 0 is the loss)")


def verify(groups, references):
    """Each sharded side against its own language's plain side. BenchError if a value differs."""
    found = {name: values(group) for name, group in groups.items()}
    for side, plain in references.items():
        if side in found:
            compare(f"{side} against {plain}", found[side], found[plain])
    return {"loss": {name: v[0] for name, v in found.items()},
            "grad_norm": {name: math.hypot(*v[1:]) for name, v in found.items()}}
