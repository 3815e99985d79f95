# SPDX-License-Identifier: Apache-2.0
"""The curves of a training run as one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure


def draw(
    metrics: Sequence[Mapping[str, Any]], dev: Sequence[Mapping[str, Any]], path: Path
) -> None:
    """Draw loss and held-out measurements against the step into a PNG file."""
    names = [name for name, value in (dev[-1] if dev else {}).items()
             if isinstance(value, list | tuple) and not name.startswith("logp")]  # fmt: skip
    figure = Figure(figsize=(10 if names else 5, 3.6))
    axes = figure.subplots(1, 2 if names else 1, squeeze=False)
    left = axes[0, 0]
    steps, loss = [m["step"] for m in metrics], np.array([m["loss"] for m in metrics])
    left.plot(steps, loss, color="0.75", linewidth=1, label="each update")
    width = max(1, len(loss) // 20)
    if width > 1:
        smooth = np.convolve(loss, np.ones(width) / width, "valid")
        left.plot(steps[width - 1 :], smooth, color="C0", label=f"mean of {width}")
        left.legend(frameon=False)
    left.set(xlabel="update", ylabel="loss, nats a token", ylim=(0, None))
    if names:
        right = axes[0, 1]
        at = [line["step"] for line in dev]
        for name in names:
            value, low, high = np.array([line[name] for line in dev], float).T
            right.errorbar(
                at, value, np.maximum(0, [value - low, high - value]), capsize=2, marker="o",
                markersize=3, label=name.replace("_", " "),
            )  # fmt: skip
        right.set(xlabel="update", ylabel="held-out, 95 % interval", ylim=(0, 1))
        right.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file, whole or not at all."""
    figure.tight_layout()
    scratch = path.with_name(path.name + ".part")
    figure.savefig(scratch, dpi=120, format="png")
    scratch.replace(path)
