"""A resumed run attempts again what failed because of the infrastructure, and counts it once."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from record_samples import trajectory

from run.test_run import configure, model, run, samples  # noqa: F401 (fixtures)
from toolroll.records.reader import read_records
from toolroll.records.stats.statistics import RunStats
from toolroll.records.writer import RecordWriter
from toolroll.run import resume
from toolroll.run.aggregates import SampleOutcome
from toolroll.run.config import RunConfig
from toolroll.run.resume import SUPERSEDED_DIR, ResumeState, set_aside_failed
from toolroll.run.run import Run


def make_reward(directory: Path, name: str) -> str:
    """Write a reward function that fails for every third question while a file exists. Return its dotted path."""
    (directory / f"{name}.py").write_text(
        "from pathlib import Path\n"
        "from toolroll.errors import InfraFault\n"
        "def score(trajectory):\n"
        f"    if Path({str(directory / 'broken')!r}).exists() and int(trajectory.group) % 3 == 1:\n"
        "        raise InfraFault('the judge is down')\n"
        "    return 1.0\n"
    )
    return f"{name}.score"


@pytest.fixture
def failing(configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("toolroll.run.sample_worker.SAMPLE_RETRY_DELAYS_S", ())
    reward = make_reward(tmp_path, f"judge_{abs(hash(tmp_path))}")
    (tmp_path / "broken").touch()
    file: Path = configure(rewards={"functions": {"judge": reward}})
    return file


async def test_failed_samples_are_attempted_again(failing: Path) -> None:
    first = await run(failing)
    assert first.aggregates["outcomes"] == {"ok": 39, "infra": 21}
    (failing.parent / "broken").unlink()
    async with Run(RunConfig.load(failing)) as resumed:
        await resumed.wait()
    status = await resumed.status()
    assert (resumed.retried, status.resumed, status.done) == (21, 39, 60)
    assert status.aggregates["outcomes"] == {"ok": 60}
    assert status.aggregates["pass_at_k"]["1"] == 1.0
    assert set(samples(failing).values()) == {1}, "every sample counts once"
    records = failing.parent / "records"
    assert RunStats(read_records(records)).total.samples == 60
    kept = list(read_records(records / SUPERSEDED_DIR))
    assert Counter(record.outcome for record in kept) == {"infra": 21}, "nothing is deleted"
    again = await run(failing)
    assert (again.resumed, again.tokens) == (60, 0)


async def test_retry_none_keeps_failed_samples(failing: Path) -> None:
    await run(failing)
    (failing.parent / "broken").unlink()
    again = await run(failing, "retry=none")
    assert (again.resumed, again.tokens) == (60, 0)
    assert again.aggregates["outcomes"] == {"ok": 39, "infra": 21}


def test_other_lines_are_not_changed(tmp_path: Path) -> None:
    """Lines of verl, damaged lines and texts that mention the word stay where they are."""
    lines = [
        b'{"input":"infra","output":"\\"infra\\"","outcome":"infra"}\n',
        b'{"format":"toolroll/1","outcome":"ok","output":"\\"infra\\""}\n',
        b'{"format":"toolroll/1","outcome":"infra","group":"1","sample":0}\n',
        b'{"format":"toolroll/1","outcome":"infra","gro',
    ]
    (tmp_path / "0.jsonl").write_bytes(b"".join(lines))
    assert set_aside_failed(tmp_path) == 1
    assert (tmp_path / "0.jsonl").read_bytes() == b"".join([*lines[:2], lines[3]])
    assert (tmp_path / SUPERSEDED_DIR / "0.jsonl").read_bytes() == lines[2]
    assert set_aside_failed(tmp_path) == 0


def test_complete_steps_without_failures_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may have terabytes of records."""
    state = ResumeState(tmp_path, n=1, prompts_per_step=1)
    with RecordWriter(tmp_path) as writer:
        for row, outcome in enumerate(["ok", "infra", "ok"]):
            one = trajectory(group=str(row), sample=0, outcome=outcome)
            writer.append(one, row)
            state.add(SampleOutcome.from_trajectory(one, row))
    with (tmp_path / "2.jsonl").open("ab") as changed:
        changed.write(b"\n")
    read: list[str] = []
    monkeypatch.setattr(resume, "_set_aside", lambda file, _: read.append(Path(file.path).name) or 0)
    set_aside_failed(tmp_path)
    assert sorted(read) == ["1.jsonl", "2.jsonl"]
