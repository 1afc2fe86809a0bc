#!/usr/bin/env python3
"""Draws OUT/loss_curve.png from OUT/metrics.csv:  plot.py OUT"""
import csv
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def smooth(values, weight=0.9):
    """Exponential moving average, without the pull of its start."""
    out, mean, total = [], 0.0, 0.0
    for value in values:
        mean = weight * mean + (1 - weight) * value
        total = weight * total + (1 - weight)
        out.append(mean / total)
    return out


def main(folder):
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        sys.exit(f"plot.py: {folder / 'metrics.csv'} has no rows")
    steps = [int(row["step"]) for row in rows]
    losses = [float(row["loss"]) for row in rows]
    validation = [(int(row["step"]), float(row["val_loss"])) for row in rows if row["val_loss"]]

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, losses, color="C0", alpha=0.25, linewidth=0.8, label="training, each step")
    axes.plot(steps, smooth(losses), color="C0", label="training, smoothed")
    if validation:
        axes.plot(*zip(*validation), "o-", color="C1", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="GPT")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "loss_curve.png", dpi=120)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]))
