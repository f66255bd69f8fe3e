"""What a run left behind, checked; and one line with its figures.

python check_run.py DIRECTORY PROBLEMS SAMPLES
"""

import json
import sys
from collections import Counter
from pathlib import Path

from toolroll.records.reader import read


def main() -> None:
    """Check, then print."""
    directory, problems, samples = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    told = json.loads((directory / "told.json").read_text())
    stats = json.loads((directory / "stats.json").read_text())
    records = list(read(directory / "rollouts"))
    seen = Counter((int(str(one.group)), int(str(one.sample))) for one in records)
    expected = Counter((row, sample) for row in range(problems) for sample in range(samples))
    assert seen == expected, f"not recorded once: {(seen - expected) + (expected - seen)}"
    assert told["complete"], told
    assert told["done"] == problems * samples, told
    writers = {one.name.rsplit("-", 1)[0] for one in (directory / "rollouts").iterdir() if one.is_dir()}
    assert len(writers) == 2, f"both nodes take part: {writers}"
    assert {one.outcome for one in records} == {"ok"}, Counter(one.error for one in records)
    assert {one.fidelity for one in records} == {"exact"}
    ran = sum(any(call.get("fault") is None for call in one.calls) for one in records)
    # A quarter of them, usually: it is a small model, and it is left to chance what it samples.
    assert ran >= problems * samples // 16, f"only {ran} of {len(records)} had a call that ran"
    tally = told["tally"]
    figures = {
        "trajectories": told["done"],
        "lost_workers": told["lost_workers"],
        "seconds": round(told["seconds"], 1),
        "tokens_per_s": round(told["tokens"] / told["seconds"], 1),
        "tool_calls": told["calls"],
        "trajectories_with_a_call_that_ran": ran,
        "mean_reward": tally["mean_reward"],
        "pass_at_k": tally["pass_at_k"],
        "finish_reasons": tally["finish_reasons"],
        "samples_in_stats": stats["total"]["samples"],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
