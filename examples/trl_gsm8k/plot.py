"""Plot reward and tool calls of a run by step. Requires `pip install '.[records]'`.

python plot.py out/dumps curve.png
"""

from __future__ import annotations

import sys
from collections import defaultdict
from statistics import fmean

from toolroll import read_records


def curves(dumps: str) -> dict[str, dict[int, float]]:
    """Return the curves by name and step, without excluded samples."""
    rewards: dict[int, list[float]] = defaultdict(list)
    has_call: dict[int, list[bool]] = defaultdict(list)
    succeeded: dict[int, list[bool]] = defaultdict(list)
    for record in read_records(dumps):
        if record.step is None or record.score is None:
            continue
        ran = [call.get("fault") is None for call in record.calls]
        rewards[record.step].append(record.score)
        has_call[record.step].append(any(ran))
        succeeded[record.step] += ran
    return {
        "reward": {step: fmean(values) for step, values in sorted(rewards.items())},
        "samples with a call that ran": {step: fmean(values) for step, values in sorted(has_call.items())},
        "calls that parsed and ran": {step: fmean(values) for step, values in sorted(succeeded.items()) if values},
    }


def main(dumps: str, output: str) -> None:
    """Write the plot to a file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for name, curve in curves(dumps).items():
        axes.plot(list(curve), list(curve.values()), marker="o", markersize=3, label=name)
    axes.set(xlabel="step", ylim=(0, 1.55), title="TRL GRPO, SmolLM2-135M-Instruct with the code interpreter")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(output, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
