"""A plot of the quickstart's training curves."""

from __future__ import annotations

from pathlib import Path

from xtk.artifacts.run_folders import METRICS_FILE
from xtk.training.metrics_file import read_metrics

CURVE_STYLES = {"ce": ("cross-entropy only", "tab:orange"), "distilled": ("distilled", "tab:blue")}


def plot_training_curves(folder: Path, seeds: int, teacher_bits_per_byte: float, path: Path) -> None:
    """Plot training cross-entropy and held-out bits per byte of all students; colors show the objective."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for kind, (label, color) in CURVE_STYLES.items():
        for seed in range(seeds):
            records = read_metrics(folder / f"{kind}-{seed}" / METRICS_FILE)
            name = label if seed == 0 else None
            left.plot([r["step"] for r in records], [r["ce"] for r in records], color=color, alpha=0.5, label=name)
            held_out = [(r["step"], r["eval_bits_per_byte"]) for r in records if "eval_bits_per_byte" in r]
            right.plot(*zip(*held_out, strict=True), color=color, marker="o", label=name)
    right.axhline(teacher_bits_per_byte, color="grey", linestyle="--", label="teacher")
    left.set(xlabel="step", ylabel="cross-entropy, nats per token", title="training documents")
    right.set(xlabel="step", ylabel="bits per byte", title="held-out text")
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
