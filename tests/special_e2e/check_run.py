"""Check the output of a run and print its figures on one line.

Usage: python check_run.py DIRECTORY PROBLEMS SAMPLES
"""

import json
import sys
from collections import Counter
from pathlib import Path

from toolroll.records.reader import read_records


def main() -> None:
    """Check the records, then print the figures."""
    directory, problems, samples = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    result = json.loads((directory / "result.json").read_text())
    stats = json.loads((directory / "stats.json").read_text())
    records = list(read_records(directory / "rollouts"))
    seen = Counter((int(str(one.group)), int(str(one.sample))) for one in records)
    expected = Counter((row, sample) for row in range(problems) for sample in range(samples))
    assert seen == expected, f"samples not recorded exactly once: {(seen - expected) + (expected - seen)}"
    assert result["complete"], result
    assert result["done"] == problems * samples, result
    writers = {one.name.rsplit("-", 1)[0] for one in (directory / "rollouts").iterdir() if one.is_dir()}
    assert len(writers) == 2, f"expected records of two nodes: {writers}"
    assert {one.outcome for one in records} == {"ok"}, Counter(one.error for one in records)
    assert {one.fidelity for one in records} == {"exact"}
    executed = sum(any(call.get("fault") is None for call in one.calls) for one in records)
    # Usually a quarter of the trajectories: the model is small, and sampling is random.
    assert executed >= problems * samples // 16, f"only {executed} of {len(records)} executed a call"
    aggregates = result["tally"]
    figures = {
        "trajectories": result["done"],
        "lost_workers": result["lost_workers"],
        "seconds": round(result["seconds"], 1),
        "tokens_per_s": round(result["tokens"] / result["seconds"], 1),
        "tool_calls": result["calls"],
        "trajectories_with_executed_call": executed,
        "mean_reward": aggregates["mean_reward"],
        "pass_at_k": aggregates["pass_at_k"],
        "finish_reasons": aggregates["finish_reasons"],
        "samples_in_stats": stats["total"]["samples"],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
