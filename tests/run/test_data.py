"""Rows of a run keep their numbers, from any start, in every format."""

import gzip
import json
import re
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import scaled

from toolroll.errors import ConfigError
from toolroll.rollout.rollout import Prompt
from toolroll.run import row_files
from toolroll.run.config import DataConfig
from toolroll.run.data import PromptRows
from toolroll.run.row_files import BadRow

FORMATS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow", "feather"]


def numbered(first: int, count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"prompt {number}", "number": number} for number in range(first, first + count)]


def write(path: Path, rows: Sequence[dict[str, Any]], *, group: int = 100) -> Path:
    """Write a file in the format of its suffix; `.arrow` is an Arrow stream, `.feather` an Arrow file."""
    text = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    if path.name.endswith(".jsonl"):
        path.write_bytes(text)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(text))
    elif path.suffix == ".zst":
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            file.write(text)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=group)
    else:
        table = pa.Table.from_pylist(list(rows))
        kind = pa.ipc.new_file if path.suffix == ".feather" else pa.ipc.new_stream
        path = path.with_suffix(".arrow")
        with kind(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=group)
    return path


def rows_of(path: Any, **other: Any) -> PromptRows:
    return PromptRows(DataConfig(path=[str(one) for one in path] if isinstance(path, list) else str(path), **other))


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_from_any_start_over_several_files(kind: str, tmp_path: Path) -> None:
    sizes = [250, 1, 700]
    paths = [write(tmp_path / f"{place}.{kind}", numbered(sum(sizes[:place]), sizes[place])) for place in range(3)]
    rows = rows_of(paths)
    expected = [(row["number"], row) for row in numbered(0, sum(sizes))]
    assert list(rows.rows()) == expected
    for start in (1, 99, 100, 249, 250, 251, 252, 600, 950, 951, 5000):
        assert list(rows.rows(start)) == expected[start:]
    assert rows.known_length() == (None if kind.endswith(("gz", "zst")) else 951)
    assert list(rows_of(paths, limit=251).rows(240)) == expected[240:251]
    assert list(rows_of(tmp_path).rows()) == expected, "files of a directory are sorted by name"


@settings(max_examples=scaled(150))
@given(
    files=st.lists(
        st.tuples(st.lists(st.sampled_from(["row", "row", "row", "", "  \r", "{bad", "x" * 40])), st.booleans()),
        min_size=1,
        max_size=3,
    ),
    start=st.integers(0, 30),
    block=st.integers(2, 50),
)
def test_invalid_lines_keep_row_numbers(
    files: list[tuple[list[str], bool]], start: int, block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    good = {"prompt": "p"}
    (folder / "0.jsonl").write_text(json.dumps(good) + "\n")
    expected: list[Any] = [(0, good)]
    for place, (kinds, ends) in enumerate(files, 1):
        lines = [json.dumps(good) if kind == "row" else kind for kind in kinds]
        (folder / f"{place}.jsonl").write_text("\n".join(lines) + ("\n" if ends else ""))
        while kinds and not kinds[-1].strip():
            kinds.pop()
        expected += [(len(expected) + at, good) if kind == "row" else None for at, kind in enumerate(kinds)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_files, "READ_BLOCK_BYTES", block)
        rows = rows_of(folder)
        found = list(rows.rows(start))
        assert rows.known_length() == len(expected)
    assert [one[0] for one in found] == list(range(len(expected)))[start:]
    assert [None if isinstance(one, BadRow) else one for one in found] == expected[start:]


def test_invalid_row_does_not_affect_others(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "one"}\n{"prompt": \n[1]\n\n{"other": 1}\n{"prompt": ""}\n{"prompt": 7}\n{"prompt": "two"}\n'
    )
    found = list(rows_of(tmp_path / "rows.jsonl").rows())
    assert [one for one in found if not isinstance(one, BadRow)] == [(0, {"prompt": "one"}), (7, {"prompt": "two"})]
    reasons = {one.number: one.reason for one in found if isinstance(one, BadRow)}
    assert "Invalid JSON" in reasons[1]
    assert "Expected a JSON object" in reasons[2]
    assert reasons[3] == "The line is blank."
    assert reasons[4] == "Column 'prompt' is missing."
    assert reasons[5] == "Column 'prompt' is empty."
    assert reasons[6] == "Column 'prompt' is neither text nor a list of messages: 7."


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": [{"role": "human", "content": "hi"}]}, "Invalid prompt: messages.0.role: "),
        ({"prompt": [{"role": "user", "content": 5}]}, "Invalid prompt: messages.0.content"),
        ({"prompt": "hi", "tools_kwargs": {"t": {"create": {}}}}, r".*'create' for tool 't' \(did you mean"),
        ({"prompt": "hi", "tools_kwargs": {"t": {"create_kwargs": {}}}, "sampling_params": 5}, ".*sampling_params"),
    ],
)
def test_row_with_invalid_prompt_is_a_bad_row(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    first, second = rows_of(write(tmp_path / "rows.jsonl", [{"prompt": "hi"}, row])).rows()
    assert first == (0, {"prompt": "hi"})
    assert isinstance(second, BadRow)
    assert re.match(reason, second.reason)
    with pytest.raises(ConfigError, match=f"Row 0: {reason}"):
        rows_of(write(tmp_path / "invalid.jsonl", [row])).check()


def test_large_integer_ground_truth_is_exact(tmp_path: Path) -> None:
    truth = 3**200
    kwargs = {"calc": {"create_kwargs": {"ground_truth": truth}}}
    row = {"prompt": "3 ** 200?", "truth": truth, "kwargs": json.dumps(kwargs)}
    path = write(tmp_path / "rows.jsonl", [row])
    [(_, made)] = rows_of(path, ground_truth="truth", tools_kwargs="kwargs").rows()  # type: ignore[misc]
    assert (made["ground_truth"], made["tools_kwargs"]) == (truth, kwargs)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_unknown_column_error_lists_available_columns(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"rows.{kind}", [{"question": "q", "answer": "a"}])
    with pytest.raises(ConfigError, match=r"Unknown column 'prompt' \(available: question, answer\)"):
        next(iter(rows_of(path).rows()))
    with pytest.raises(ConfigError, match=r"Unknown column 'anwser' \(did you mean 'answer'\?\)"):
        rows_of(path, prompt="question", ground_truth="anwser").check()
    template = {"calc": {"create_kwargs": {"ground_truth": {"column": "truth"}}}}
    with pytest.raises(ConfigError, match="Unknown column 'truth'"):
        rows_of(path, prompt="question", tools_kwargs=template).check()


def test_unusable_data_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="File or directory not found"):
        rows_of(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match=r"No data files in .* Supported: \.jsonl"):
        rows_of(tmp_path)
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(ConfigError, match=r"Unknown format of .*rows\.csv"):
        rows_of(tmp_path / "rows.csv")
    (tmp_path / "all.json").write_text('[\n{"prompt": "a"},\n{"prompt": "b"}\n]\n')
    with pytest.raises(ConfigError, match=r"all\.json is a JSON list"):
        rows_of(tmp_path / "all.json")
    (tmp_path / "bad.jsonl").write_text("one\ntwo\n")
    with pytest.raises(ConfigError, match=r"bad\.jsonl: Row 0: Invalid JSON"):
        rows_of(tmp_path / "bad.jsonl").check()
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="The file has no rows"):
        rows_of(tmp_path / "empty.jsonl").check()
    for name in ("half.parquet", "half.arrow"):
        (tmp_path / name).write_bytes(b"PAR1 and then nothing")
        with pytest.raises(ConfigError, match=f"Cannot read .*{name}"):
            rows_of(tmp_path / name).check()


def test_columns_are_converted_to_a_prompt(tmp_path: Path) -> None:
    row = {"question": "What is 6 times 7?", "answer": "… #### 42", "level": 1, "group": 3, "messages": "mine"}
    path = write(tmp_path / "rows.jsonl", [row])
    config: dict[str, Any] = {
        "prompt": "question",
        "ground_truth": "answer",
        "system": "Be brief.",
        "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": {"column": "answer"}, "tries": 3}}},
    }
    ((number, made),) = rows_of(path, **config).rows()
    prompt = Prompt.model_validate(made)
    assert number == 0
    assert [(one.role, one.content) for one in prompt.messages] == [
        ("system", "Be brief."),
        ("user", "What is 6 times 7?"),
    ]
    assert prompt.extra == {"answer": "… #### 42", "ground_truth": "… #### 42", "level": 1}
    assert prompt.tools_kwargs == {"calc": {"create_kwargs": {"ground_truth": "… #### 42", "tries": 3}}}
    assert prompt.group is None, "a column named group is not the group of the prompt"


def test_messages_keep_their_own_system_message(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    path = write(tmp_path / "rows.jsonl", [{"messages": own}, {"messages": own[1:]}])
    first, second = (made["messages"] for _, made in rows_of(path, system="ours").rows())
    assert first == own
    assert second == [{"role": "system", "content": "ours"}, own[1]]


def test_rows_prepared_for_verl(tmp_path: Path) -> None:
    """Parquet rows have the union of all keys: missing values are null."""

    def row(question: str, answer: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": 0, "tools_kwargs": kwargs},
        }

    path = write(
        tmp_path / "train.parquet",
        [
            row("one?", "1", {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1"}}}),
            row("two?", "2", {"code_interpreter": {"create_kwargs": {"ground_truth": "2", "files": "x"}}}),
        ],
    )
    rows = rows_of(path, ground_truth="reward_model.ground_truth", tools_kwargs="extra_info.tools_kwargs")
    first, second = (Prompt.model_validate(made) for _, made in rows.rows())
    assert first.tools_kwargs == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1"}}}
    assert second.tools_kwargs == {"code_interpreter": {"create_kwargs": {"ground_truth": "2", "files": "x"}}}
    assert first.extra["ground_truth"] == "1"
    assert first.extra["data_source"] == "openai/gsm8k"
    assert first.messages[0].content == "one?"


def test_tools_kwargs_may_be_written_as_json(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.jsonl",
        [{"prompt": "p", "kw": '{"t": {"create_kwargs": {"x": 1}}}'}, {"prompt": "p", "kw": "{"}],
    )
    first, second = rows_of(path, tools_kwargs="kw").rows()
    assert first == (0, {"prompt": "p", "tools_kwargs": {"t": {"create_kwargs": {"x": 1}}}})
    assert isinstance(second, BadRow)


def save_as_datasets_does(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    half = len(rows) // 2
    names = [f"data-{place:05}-of-00002.arrow" for place in range(2)]
    for name, some in zip(names, (rows[:half], rows[half:]), strict=True):
        write(folder / name, some)
    (folder / "cache-1234.arrow").write_bytes(b"not part of the data set")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def test_data_set_saved_to_disk(tmp_path: Path) -> None:
    save_as_datasets_does(tmp_path / "one", numbered(0, 20))
    assert [number for number, _ in rows_of(tmp_path / "one").rows(5)] == list(range(5, 20))
    for split in ("train", "test"):
        save_as_datasets_does(tmp_path / "two" / split, numbered(0, 4))
    (tmp_path / "two" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match=r"several splits.*two/train, .*two/test"):
        rows_of(tmp_path / "two")
    assert rows_of(tmp_path / "two" / "test").known_length() == 4
    (tmp_path / "two" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    assert rows_of(tmp_path / "two").known_length() == 4


def test_fingerprint_depends_on_content_and_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", numbered(0, 5000))
    whole = rows_of(path).fingerprint()
    assert rows_of(path).fingerprint() == whole
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (moved / "a.jsonl").write_bytes(path.read_bytes())
    assert rows_of(moved).fingerprint() == whole, "the directory does not matter"
    others = [numbered(0, 4999), numbered(0, 5001), [{"prompt": "other", "number": 0}, *numbered(1, 4999)]]
    found = {whole} | {rows_of(write(path, rows)).fingerprint() for rows in others}
    path.rename(tmp_path / "b.jsonl")
    found.add(rows_of(tmp_path / "b.jsonl").fingerprint())
    assert len(found) == 5


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_large_file_needs_bounded_time_and_memory(kind: str, tmp_path: Path) -> None:
    """With a million rows, skipping is fast, and only one batch is in memory."""
    count = 1_000_000
    if kind == "jsonl":
        path = tmp_path / "big.jsonl"
        line = json.dumps({"prompt": "p" * 100}).encode() + b"\n"
        path.write_bytes(line * count)
    else:
        table = pa.table({"prompt": pa.repeat("p" * 100, count)})
        path = tmp_path / f"big.{kind}"
        if kind == "parquet":
            pq.write_table(table, path, row_group_size=10_000)
        else:
            with pa.ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=1000)
    rows = rows_of(path)
    tracemalloc.start()
    began = time.process_time()
    assert rows.known_length() == count
    last = [number for number, _ in rows.rows(count - 3)]
    assert time.process_time() - began < 5.0
    for _ in zip(range(2000), rows.rows(), strict=False):
        pass
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert last == [count - 3, count - 2, count - 1]
    assert held < 16 << 20
