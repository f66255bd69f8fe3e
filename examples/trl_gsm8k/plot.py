"""Reward and tool calls of a run, step by step, as a picture. It needs `pip install '.[records]'`.

python plot.py out/dumps curve.png
"""

from __future__ import annotations

import sys
from collections import defaultdict
from statistics import fmean

from toolroll.records.reader import read


def curves(dumps: str) -> dict[str, dict[int, float]]:
    """By name and step. Samples that were left out count nowhere."""
    rewards: dict[int, list[float]] = defaultdict(list)
    calling: dict[int, list[bool]] = defaultdict(list)
    parsed: dict[int, list[bool]] = defaultdict(list)
    for record in read(dumps):
        if record.step is None or record.score is None:
            continue
        ran = [call.get("fault") is None for call in record.calls]
        rewards[record.step].append(record.score)
        calling[record.step].append(any(ran))
        parsed[record.step] += ran
    return {
        "reward": {step: fmean(some) for step, some in sorted(rewards.items())},
        "samples with a call that ran": {step: fmean(some) for step, some in sorted(calling.items())},
        "calls that parsed and ran": {step: fmean(some) for step, some in sorted(parsed.items()) if some},
    }


def main(dumps: str, picture: str) -> None:
    """Draw them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for name, curve in curves(dumps).items():
        axes.plot(list(curve), list(curve.values()), marker="o", markersize=3, label=name)
    axes.set(xlabel="step", ylim=(0, 1.55), title="GRPO by TRL, SmolLM2-135M-Instruct with the code interpreter")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
