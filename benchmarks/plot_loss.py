"""Draws the loss curves of runs of the example.

mpirun -n 4 python examples/gpt2_zero3.py ... --json run.json
python benchmarks/plot_loss.py run.json --out loss.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np


def main() -> None:
    """Reads, draws, writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, help="files that the example wrote with --json")
    parser.add_argument("--out", type=Path, required=True, help="the picture (PNG)")
    parser.add_argument("--average", type=int, default=25, help="steps of the running mean")
    options = parser.parse_args()

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    for path in options.runs:
        run = json.loads(path.read_text())
        steps = np.array([step["step"] for step in run["steps"]])
        losses = np.array([step["loss"] for step in run["steps"]])
        window = min(options.average, len(losses))
        mean = np.convolve(losses, np.ones(window) / window, "valid")
        engine = f"ZeRO-{run['zero_stage']}" if run["zero_stage"] else "DDP"
        label = f"{engine}, {run['world_size']} ranks, {run['params'] / 1e6:.2f} M parameters"
        (line,) = axes.plot(steps, losses, alpha=0.25, linewidth=0.6)
        axes.plot(steps[window - 1 :], mean, color=line.get_color(), label=f"{label}: training")
        axes.plot(steps[-1], run["val_loss"], "o", color=line.get_color(), label=f"validation {run['val_loss']:.3f}")
    axes.set(xlabel="step", ylabel="cross-entropy a token (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
