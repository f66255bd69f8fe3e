"""Each trajectory is traced completely, and tracing neither costs nor breaks anything."""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from collector import Collector, attributes, tree
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from record_samples import ANY_TEXT, CALLS, NUMBERS, TURNS, streams, trajectory
from rollout import small_tokenizer
from strategies import scaled

from toolroll import Rollout, ScriptedEngine, start_tracing, tool, trace_headers
from toolroll.errors import ConfigError, Fault
from toolroll.records.export.otlp import export
from toolroll.records.json_line import decode, encode
from toolroll.records.line import trajectory_fields
from toolroll.records.reader import read_records
from toolroll.records.writer import RecordWriter
from toolroll.tracing import exporter
from toolroll.tracing.context import call_span_id, current_sink, enter_call, finish_trajectory, read_trace_id, trace_id
from toolroll.tracing.spans import live_fields, trajectory_spans

CALL = '<tool_call>\n{"name": "traced", "arguments": {}}\n</tool_call>'
SENDER = exporter.SpanSender("http://127.0.0.1:4318")
TRACED = st.builds(
    trajectory,
    request_id=ANY_TEXT,
    tokens=streams(),
    turns=st.lists(TURNS, max_size=3),
    calls=st.lists(CALLS, max_size=3),
    seconds=NUMBERS,
)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


def scripted_rollout(headers: list[dict[str, str]]) -> Rollout:
    """Return a rollout whose model calls a tool twice at once, and then answers."""
    tokenizer = small_tokenizer.make(
        small_tokenizer.CHATML, small_tokenizer.MARKERS, chat_template=small_tokenizer.CHATML_TEMPLATE
    )

    @tool
    async def traced() -> str:
        """Record the headers that continue the trace."""
        headers.append(trace_headers())
        await asyncio.sleep(0.01)
        return "done"

    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    turns = [[*tokenizer.encode(text, add_special_tokens=False), stop] for text in (CALL + CALL, "That is all.")]
    return Rollout(engine=ScriptedEngine(turns, delay=0.01), tokenizer=tokenizer, tools=[traced], tool_prompt="hermes")


async def test_collector_receives_the_tree_of_a_rollout(collector: Collector) -> None:
    headers: list[dict[str, str]] = []
    tracing = start_tracing(collector.url, model="small", engine="scripted")
    async with scripted_rollout(headers) as rollout:
        found = await rollout.sample("Question?", group="7", sample=3)
    await asyncio.to_thread(tracing.close)
    assert collector.paths == {"/v1/traces"}
    call = ("invoke_agent", "turn 0", "execute_tool traced")
    assert tree(collector.spans) == [
        ("invoke_agent",),
        ("invoke_agent", "turn 0"),
        ("invoke_agent", "turn 0", "chat small"),
        call,
        call,
        ("invoke_agent", "turn 1"),
        ("invoke_agent", "turn 1", "chat small"),
    ]
    assert {span.trace_id.hex() for span in collector.spans} == {found.request_id}
    calls = {span.span_id.hex() for span in collector.spans if span.name == "execute_tool traced"}
    assert {one["traceparent"] for one in headers} == {f"00-{found.request_id}-{one}-01" for one in calls}
    [root] = [span for span in collector.spans if not span.parent_span_id]
    assert attributes(root)["toolroll.group"] == "7"
    by_id = {span.span_id: span for span in collector.spans}
    for span in collector.spans:
        parent = by_id.get(span.parent_span_id, span)
        assert parent.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= parent.end_time_unix_nano
    assert abs(root.end_time_unix_nano / 1e9 - time.time()) < 60
    first, second = sorted(
        (span for span in collector.spans if span.name == "chat small"), key=lambda span: span.start_time_unix_nano
    )
    assert first.end_time_unix_nano < second.start_time_unix_nano
    assert attributes(first)["gen_ai.usage.input_tokens"] == found.tokens.prompt_length
    assert attributes(first)["gen_ai.provider.name"] == "scripted"


def test_attributes_are_those_of_the_conventions() -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as conventions

    used = {name for span in trajectory_spans(live_fields(trajectory())) for name in span.attributes}
    known = {value for name, value in vars(conventions).items() if name.startswith("GEN_AI_")}
    assert {name for name in used if not name.startswith("toolroll.")} - known == set()
    assert "gen_ai.tool.name" in used


def test_spans_of_queue_and_sandbox_are_in_the_call() -> None:
    spans = {span.name: span for span in trajectory_spans(live_fields(trajectory(request_id="ab" * 16)))}
    call, sandbox = spans["execute_tool code_interpreter"], spans["sandbox"]
    assert (call.trace_id, call.span_id) == ("ab" * 16, call_span_id("ab" * 16, 0, 0))
    assert sandbox.parent_id == call.span_id
    assert sandbox.start == pytest.approx(call.start + 0.25)
    assert sandbox.end == call.end
    assert sandbox.attributes["toolroll.sandbox.run_seconds"] == 0.5


def test_faults_are_errors_of_their_span() -> None:
    faulty = replace(trajectory().calls[0], fault=Fault.POLICY, error="x" * 1000)
    spans = {span.name: span for span in trajectory_spans(live_fields(trajectory(calls=[faulty])))}
    call = spans["execute_tool code_interpreter"]
    assert (call.attributes["error.type"], call.error) == ("policy", "x" * 200)
    assert spans["invoke_agent"].error is None


def test_odd_metrics_of_a_tool_can_be_sent() -> None:
    metrics = {"queue_wait": 10**400, "execution_time": 2**70, "outcome": {"a": object()}, "attempts": 2**70}
    odd = replace(trajectory().calls[0], metrics=metrics)
    assert encode_spans([SENDER._to_otel(one) for one in trajectory_spans(live_fields(trajectory(calls=[odd])))])


def test_value_that_breaks_the_encoding_does_not_end_tracing(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(dict[str, Any]):
        def get(self, *_: Any) -> Any:
            raise KeyError("broken")

    broken = replace(trajectory().calls[0], metrics=Broken())
    tracing = start_tracing(collector.url)
    for one in (trajectory(0, calls=[broken]), trajectory(1)):
        finish_trajectory(one)
    tracing.close()
    assert {span.trace_id.hex() for span in collector.spans} == {trace_id("request-1")}
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_spans_wait_for_others_only_for_a_moment(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that arrive one after another do not make the first ones wait longer."""
    monkeypatch.setattr(exporter, "BATCH_INTERVAL_S", 0.2)
    tracing = start_tracing(collector.url)
    for number in range(20):
        finish_trajectory(trajectory(number))
        time.sleep(0.05)
    assert collector.requests > 1
    tracing.close()


def test_closing_takes_bounded_time_if_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the time to add the end nor the time to send the rest is used twice."""
    monkeypatch.setattr(exporter, "MAX_PENDING_TRAJECTORIES", 1)
    monkeypatch.setattr(exporter, "MAX_BATCH_SPANS", 1)
    monkeypatch.setattr(exporter, "FLUSH_TIMEOUT_S", 1.0)
    closed = threading.Event()

    def send(self: exporter.SpanSender, spans: Any) -> bool:
        closed.wait(0.8)
        return True

    monkeypatch.setattr(exporter.SpanSender, "send", send)
    monkeypatch.setattr(exporter.SpanSender, "close", lambda self: closed.set())
    tracing = start_tracing("http://127.0.0.1:4318")
    finish_trajectory(trajectory(0))
    time.sleep(0.1)
    finish_trajectory(trajectory(1))
    started = time.monotonic()
    tracing.close()
    assert time.monotonic() - started < 1.5


def test_credentials_in_errors_are_hidden() -> None:
    faulty = replace(trajectory().calls[0], fault=Fault.INFRA, error="GET http://me:secret@db/x failed")
    spans = trajectory_spans(live_fields(trajectory(calls=[faulty])))
    assert [span.error for span in spans if span.error] == ["GET http://***@db/x failed"]


def test_sampled_fraction_of_trajectories_is_traced(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    ids = [uuid4().hex for _ in range(400)]
    tracing = start_tracing(collector.url)
    flags = {}
    for one in ids:
        enter_call(one, 0, 0)
        flags[one] = trace_headers()["traceparent"][-2:]
        finish_trajectory(trajectory(request_id=one))
    tracing.close()
    sampled = {span.trace_id.hex() for span in collector.spans}
    assert 50 < len(sampled) < 150
    assert sampled == {one for one, flag in flags.items() if flag == "01"}
    assert set(flags.values()) == {"00", "01"}


@pytest.mark.parametrize(
    ("sampler", "argument", "expected"),
    [("", "0.1", 1.0), ("always_on", None, 1.0), ("always_off", None, 0.0), ("traceidratio", "0.5", 0.5)],
)
def test_sample_ratio_is_that_of_the_environment(
    sampler: str, argument: str | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    if argument is not None:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    assert exporter.sample_ratio() == expected
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    for invalid in ("10%", "nan", "2"):
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", invalid)
        with pytest.raises(ConfigError, match=f"OTEL_TRACES_SAMPLER_ARG: '{invalid}'. Expected a number from 0 to 1"):
            exporter.sample_ratio()


@settings(max_examples=scaled(30))
@given(TRACED, st.booleans())
def test_record_gives_the_spans_of_its_trajectory(given: Any, has_times: bool) -> None:
    if has_times:
        given.started_at = 1e9
        given.turns = [replace(one, start=float(index)) for index, one in enumerate(given.turns)]
        given.calls = [replace(one, start=float(index)) for index, one in enumerate(given.calls)]
    line = decode(encode(trajectory_fields(given, 0)))
    # Text of the model can be sent, whatever it is.
    encode_spans([SENDER._to_otel(one) for one in trajectory_spans(live_fields(given))])
    recorded, live = trajectory_spans(line), trajectory_spans(live_fields(given))
    assert [(one.name, one.span_id, one.parent_id) for one in recorded] == [
        (one.name, one.span_id, one.parent_id) for one in live
    ]
    ids = [one.span_id for one in recorded]
    assert len(set(ids)) == len(ids)
    assert recorded[0].parent_id is None
    for index, span in enumerate(recorded):
        assert span.start <= span.end
        assert index == 0 or span.parent_id in ids[:index]
        assert not has_times or recorded[0].start == 1e9


def test_old_records_are_exported(collector: Collector, tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:
        for number in range(300):
            writer.append(trajectory(number), step=0)
        writer.append({"output": "written by verl"}, step=0)
    counts = export(read_records(tmp_path), collector.url)
    assert (counts.records, counts.skipped, counts.spans) == (300, 1, len(collector.spans))
    assert collector.requests > 1, "sent in batches"
    first = [span for span in collector.spans if span.trace_id == collector.spans[0].trace_id]
    assert len(tree(first)) == 10
    with pytest.raises(ConfigError, match="Invalid URL of a collector: 'localhost'"):
        export(read_records(tmp_path), "localhost")


def test_dead_collector_costs_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "FLUSH_TIMEOUT_S", 0.2)
    read: list[Any] = []
    monkeypatch.setattr(exporter, "live_fields", lambda one: read.append(one) or live_fields(one))
    with Collector(status=503) as refusing:
        tracing = start_tracing(refusing.url)
        sink = current_sink()
        assert sink is not None
        for number in range(2 * exporter.MAX_PENDING_TRAJECTORIES):
            sink(trajectory(number))
        refusing.wait_for(lambda: refusing.requests > 0)
        started = time.monotonic()
        tracing.close()
        seconds = time.monotonic() - started
    assert tracing.dropped >= exporter.MAX_PENDING_TRAJECTORIES - 2 * exporter.MAX_BATCH_SPANS
    assert len(read) == 2 * exporter.MAX_PENDING_TRAJECTORIES - tracing.dropped, "dropped ones are not read"
    assert seconds < exporter.FLUSH_TIMEOUT_S + exporter.GIVE_UP_TIMEOUT_S + 2.0
    [warning] = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert warning.endswith("The rollout continues.")
    assert current_sink() is None
    assert trace_headers() == {}


@pytest.mark.parametrize("status", [401, 404])
def test_warning_has_the_status_of_the_collector(status: int, caplog: pytest.LogCaptureFixture) -> None:
    with Collector(status=status) as refusing:
        tracing = start_tracing(refusing.url)
        finish_trajectory(trajectory())
        tracing.close()
    [warning] = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert f"code: {status}" in warning


def test_credentials_in_errors_of_the_exporter_are_hidden(caplog: pytest.LogCaptureFixture) -> None:
    tracing = exporter.Tracing("http://127.0.0.1:4318")

    def send(spans: Any) -> bool:
        logging.getLogger(exporter.EXPORTER_LOGGER).error("No route to %s.", "http://me:secret@collector/v1/traces")
        return False

    tracing._sender.send = send  # type: ignore[method-assign]
    tracing.start()
    finish_trajectory(trajectory())
    tracing.close()
    [warning] = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert warning.endswith(": No route to http://***@collector/v1/traces. The rollout continues.")


def test_complete_url_of_the_environment_is_used_as_it_is(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(exporter.TRACES_ENDPOINT_VARIABLE, f"{collector.url}/teams/traces")
    tracing = start_tracing()
    finish_trajectory(trajectory())
    tracing.close()
    assert collector.paths == {"/teams/traces"}


async def test_rollout_without_tracing_does_not_import_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    headers: list[dict[str, str]] = []
    async with scripted_rollout(headers) as rollout:
        await rollout.sample("Question?")
    assert headers == [{}, {}]
    assert [name for name in sys.modules if name.startswith("opentelemetry")] == []


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (f"00-{'ab' * 16}-{'cd' * 8}-01", "ab" * 16),
        (f"00-{'00' * 16}-{'cd' * 8}-01", None),
        ("00-<script>-0-01", None),
        ("", None),
    ],
)
def test_trace_id_is_read_from_traceparent(header: str, expected: str | None) -> None:
    assert read_trace_id(header) == expected
