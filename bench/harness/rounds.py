"""Interleaved rounds, and the values that must come out of them."""

import math
from statistics import median

from .rank_group import BenchError

#: Largest relative difference of a value between a side and its plain side.
TOLERANCE = 1e-4


def run_round(group, warmup, steps, clock="us"):
    """Microseconds of a step, by one of a side's clocks: the median over the round's steps of the slowest rank's time."""
    replies = group.ask("round", warmup, steps)
    return median(max(times) for times in zip(*(reply[clock] for reply in replies)))


def interleave(groups, rounds, warmup, steps, clock="us"):
    """{side: its time in each round}. One side computes at a time; each round begins with another side."""
    names = list(groups)
    times = {name: [] for name in names}
    for r in range(rounds):
        for name in names[r % len(names):] + names[:r % len(names)]:
            times[name].append(run_round(groups[name], warmup, steps, clock))
    return times


def extra(times, side, base):
    """Median over the rounds of what `side` takes more than `base` did in the same round."""
    return median(s - b for s, b in zip(times[side], times[base]))


def values(group):
    """The joined batch's loss and every parameter's gradient norm, which all ranks must agree on."""
    replies = group.ask("check")
    norms = replies[0]["grad_norms"]
    for rank, reply in enumerate(replies):
        compare_norms(f"{group.name}, rank {rank} against rank 0", reply["grad_norms"], norms)
    return sum(reply["loss"] for reply in replies) / len(replies), norms


def compare(what, got, expected, scale=0.0):
    if not math.isclose(got, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE * 1e-2 * scale):
        raise BenchError(f"{what} is {got}, expected {expected}")


def compare_norms(what, got, expected):
    """A gradient that cancels to nothing (a key's bias) is judged by the largest one, not by itself."""
    scale = max(expected)
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        compare(f"{what}: gradient norm of parameter {i}", g, e, scale)


def verify(groups, references):
    """Each sharded side against its own language's plain side. BenchError if a value differs."""
    found = {name: values(group) for name, group in groups.items()}
    for side, plain in references.items():
        compare(f"{side} against {plain}: loss", found[side][0], found[plain][0])
        compare_norms(f"{side} against {plain}", found[side][1], found[plain][1])
    return {"loss": {name: loss for name, (loss, _) in found.items()},
            "grad_norm": {name: math.hypot(*norms) for name, (_, norms) in found.items()}}
