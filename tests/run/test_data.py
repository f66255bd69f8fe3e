"""Rows of a run: the same number for the same row, from wherever one starts, whatever the format."""

import gzip
import json
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

from toolroll.errors import ConfigError
from toolroll.rollout.rollout import Prompt
from toolroll.run import row_files
from toolroll.run.config import DataConfig
from toolroll.run.data import Rows
from toolroll.run.row_files import BadRow

FORMATS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow", "feather"]


def numbered(first: int, count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"prompt {number}", "number": number} for number in range(first, first + count)]


def write(path: Path, rows: Sequence[dict[str, Any]], *, group: int = 100) -> Path:
    """A file of rows, in the format that its name says. Two letters of Arrow: a stream, and (feather) a file."""
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


def rows_of(path: Any, **other: Any) -> Rows:
    return Rows(DataConfig(path=[str(one) for one in path] if isinstance(path, list) else str(path), **other))


@pytest.mark.parametrize("kind", FORMATS)
def test_from_wherever_one_starts_over_several_files(kind: str, tmp_path: Path) -> None:
    sizes = [250, 1, 700]
    paths = [write(tmp_path / f"{place}.{kind}", numbered(sum(sizes[:place]), sizes[place])) for place in range(3)]
    rows = rows_of(paths)
    expected = [(row["number"], row) for row in numbered(0, sum(sizes))]
    assert list(rows.rows()) == expected
    for start in (1, 99, 100, 249, 250, 251, 252, 600, 950, 951, 5000):
        assert list(rows.rows(start)) == expected[start:]
    assert rows.known_length() == (None if kind.endswith(("gz", "zst")) else 951)
    assert list(rows_of(paths, limit=251).rows(240)) == expected[240:251]
    assert list(rows_of(tmp_path).rows()) == expected, "a directory's files in the order of their names"


@settings(max_examples=150)
@given(
    files=st.lists(
        st.tuples(st.lists(st.sampled_from(["row", "row", "row", "", "  \r", "{bad", "x" * 40])), st.booleans()),
        min_size=1,
        max_size=3,
    ),
    start=st.integers(0, 30),
    block=st.integers(2, 50),
)
def test_lines_of_any_kind_keep_their_numbers(
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
        patch.setattr(row_files, "BLOCK", block)
        rows = rows_of(folder)
        found = list(rows.rows(start))
        assert rows.known_length() == len(expected)
    assert [one[0] for one in found] == list(range(len(expected)))[start:]
    assert [None if isinstance(one, BadRow) else one for one in found] == expected[start:]


def test_a_row_that_is_no_use_costs_itself_only(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "one"}\n{"prompt": \n[1]\n\n{"other": 1}\n{"prompt": ""}\n{"prompt": 7}\n{"prompt": "two"}\n'
    )
    found = list(rows_of(tmp_path / "rows.jsonl").rows())
    assert [one for one in found if not isinstance(one, BadRow)] == [(0, {"prompt": "one"}), (7, {"prompt": "two"})]
    why = {one.number: one.why for one in found if isinstance(one, BadRow)}
    assert "no JSON" in why[1]
    assert "no object" in why[2]
    assert why[3] == "The line is blank."
    assert why[4] == "It has no prompt."
    assert why[5] == "prompt is empty."
    assert why[6] == "prompt is neither a text nor messages: 7."


def test_a_ground_truth_of_any_size_is_exact(tmp_path: Path) -> None:
    truth = 3**200
    kwargs = {"calc": {"create_kwargs": {"ground_truth": truth}}}
    row = {"prompt": "3 ** 200?", "truth": truth, "kwargs": json.dumps(kwargs)}
    path = write(tmp_path / "rows.jsonl", [row])
    [(_, made)] = rows_of(path, ground_truth="truth", tools_kwargs="kwargs").rows()  # type: ignore[misc]
    assert (made["ground_truth"], made["tools_kwargs"]) == (truth, kwargs)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_a_column_that_is_not_there_is_said_with_those_that_are(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"rows.{kind}", [{"question": "q", "answer": "a"}])
    with pytest.raises(ConfigError, match=r"no column 'prompt' \(known: question, answer\)"):
        next(iter(rows_of(path).rows()))
    with pytest.raises(ConfigError, match=r"no column 'anwser' \(did you mean 'answer'\?\)"):
        rows_of(path, prompt="question", ground_truth="anwser").check()
    template = {"calc": {"create_kwargs": {"ground_truth": {"column": "truth"}}}}
    with pytest.raises(ConfigError, match="no column 'truth'"):
        rows_of(path, prompt="question", tools_kwargs=template).check()


def test_what_is_wrong_with_all_of_the_data_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file or directory"):
        rows_of(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match=r"has no file that ends with \.jsonl"):
        rows_of(tmp_path)
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(ConfigError, match=r"what is in .*rows\.csv"):
        rows_of(tmp_path / "rows.csv")
    (tmp_path / "all.json").write_text('[\n{"prompt": "a"},\n{"prompt": "b"}\n]\n')
    with pytest.raises(ConfigError, match=r"all\.json is one list"):
        rows_of(tmp_path / "all.json")
    (tmp_path / "bad.jsonl").write_text("one\ntwo\n")
    with pytest.raises(ConfigError, match=r"bad\.jsonl: row 0 can't be used\. It is no JSON"):
        rows_of(tmp_path / "bad.jsonl").check()
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="there are no rows"):
        rows_of(tmp_path / "empty.jsonl").check()
    for name in ("half.parquet", "half.arrow"):
        (tmp_path / name).write_bytes(b"PAR1 and then nothing")
        with pytest.raises(ConfigError, match=f"{name} can't be read"):
            rows_of(tmp_path / name).check()


def test_columns_become_prompts(tmp_path: Path) -> None:
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
    assert prompt.group is None, "a column that happens to be called so says nothing about groups"


def test_messages_keep_their_own_system_message(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    path = write(tmp_path / "rows.jsonl", [{"messages": own}, {"messages": own[1:]}])
    first, second = (made["messages"] for _, made in rows_of(path, system="ours").rows())
    assert first == own
    assert second == [{"role": "system", "content": "ours"}, own[1]]


def test_rows_as_verl_has_them(tmp_path: Path) -> None:
    """Parquet has every key of every row in every other: what isn't there is null."""

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
    (folder / "cache-1234.arrow").write_bytes(b"not of the data set")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def test_a_data_set_saved_to_disk(tmp_path: Path) -> None:
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


def test_other_data_have_another_fingerprint(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", numbered(0, 5000))
    whole = rows_of(path).fingerprint()
    assert rows_of(path).fingerprint() == whole
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (moved / "a.jsonl").write_bytes(path.read_bytes())
    assert rows_of(moved).fingerprint() == whole, "where they are makes no difference"
    others = [numbered(0, 4999), numbered(0, 5001), [{"prompt": "other", "number": 0}, *numbered(1, 4999)]]
    found = {whole} | {rows_of(write(path, rows)).fingerprint() for rows in others}
    path.rename(tmp_path / "b.jsonl")
    found.add(rows_of(tmp_path / "b.jsonl").fingerprint())
    assert len(found) == 5


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_a_large_file_is_neither_held_nor_read_through(kind: str, tmp_path: Path) -> None:
    """A million rows: what is skipped costs nearly nothing, and what is held is a batch."""
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
    began = time.perf_counter()
    assert rows.known_length() == count
    last = [number for number, _ in rows.rows(count - 3)]
    assert time.perf_counter() - began < 5.0
    for _ in zip(range(2000), rows.rows(), strict=False):
        pass
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert last == [count - 3, count - 2, count - 1]
    assert held < 16 << 20
