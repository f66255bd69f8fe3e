"""Tests of the cache of pure tools: keys, flights, results, and what is never stored."""

import asyncio
import copy
import itertools
import re
import shutil
import sqlite3
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from sandbox import fault_server
from strategies import scaled

from toolroll import (
    BaseTool,
    BudgetExhausted,
    ConfigError,
    Gsm8kTool,
    Hidden,
    InfraFault,
    PolicyFault,
    ResourceLimits,
    SandboxFusionTool,
    SandboxUnavailable,
    SlotTimeout,
    ToolInstance,
    ToolResponse,
    ToolResult,
    initialize_tools_from_config,
    tool,
)
from toolroll._internal.canonical import canonical
from toolroll.errors import CallTimeout
from toolroll.images import read_image
from toolroll.records.json_line import decode, encode
from toolroll.sandbox.limited import LimitedSandbox, LimitedSandboxSettings
from toolroll.tools.cache import backend, result_cache
from toolroll.tools.cache.backend import LocalStore
from toolroll.tools.cache.result_cache import ResultCache, ResultMemory
from toolroll.tools.cache.store import FLIGHT_LEASE_S, IN_MEMORY, NO_OWNER, NOT_SHARED, ResultStore, StoredResult
from toolroll.tools.cache.tool_calls import RUN_ID_FILE, close_result_caches, configure_caches
from toolroll.tools.cache_settings import CacheSettings
from toolroll.tools.registry import ToolEntry, set_cache

KEYS = st.sampled_from(["a", "b"])
OWNERS = st.sampled_from(["one", "two", "three"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary()
VALUES = st.recursive(
    SCALARS,
    lambda items: st.lists(items, max_size=3) | st.tuples(items) | st.dictionaries(st.text(max_size=3), items),
    max_leaves=8,
)


@pytest.fixture(autouse=True)
def closed_caches() -> Iterator[None]:
    yield
    close_result_caches()


class Upstream:
    """Counts the calls of a pure tool, and answers when `ready` is set."""

    def __init__(self, **options: Any) -> None:
        self.calls = 0
        self.error: Exception | None = None
        """Error of the next call that ends."""
        self.ready = asyncio.Event()
        self.ready.set()

        @tool(pure=True, **options)
        async def look_up(word: str) -> ToolResult:
            """Look up a word.

            Args:
                word: The word.
            """
            self.calls += 1
            await self.ready.wait()
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            return ToolResult(ToolResponse(text=word.upper()), 0.5, {"attempts": 2, "pages": 3})

        self.tool = look_up


async def call(tool: BaseTool[Any], arguments: Any, origin: str | None = None, **create_kwargs: Any) -> ToolResult:
    async with ToolInstance(tool, origin, create_kwargs=create_kwargs) as instance:
        return await instance.execute(arguments)


def same(one: Any, other: Any) -> bool:
    """Return True if a program cannot distinguish two values, except by the order of the keys of a dict."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other and str(one) == str(other)  # 0.0 and -0.0 are equal


@settings(max_examples=scaled(300))
@given(VALUES, VALUES)
def test_keys_are_equal_only_for_equal_values(one: Any, other: Any) -> None:
    assert (canonical(one) == canonical(other)) == same(one, other)


@settings(max_examples=scaled(100))
@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=5), st.randoms())
def test_order_of_arguments_does_not_change_key(arguments: dict[str, Any], random: Any) -> None:
    items = list(arguments.items())
    random.shuffle(items)
    assert canonical(dict(items)) == canonical(arguments)


class Flights(RuleBasedStateMachine):
    """Owners that claim, renew, end and lose flights, in any order and at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.store = ResultStore(IN_MEMORY)
        self.now = 1000.0
        self.leases: dict[str, tuple[str, float]] = {}
        self.results: dict[str, tuple[bytes, float]] = {}
        self.failures: dict[str, tuple[str, float]] = {}
        self.number = itertools.count()

    def teardown(self) -> None:
        self.store.close()

    def is_live(self, key: str) -> bool:
        return key in self.leases and self.now < self.leases[key][1]

    @rule(key=KEYS, owner=OWNERS, ttl=st.none() | st.floats(1, 20), waited=st.floats(0, 10))
    def claim(self, key: str, owner: str, ttl: float | None, waited: float) -> None:
        claim = self.store.claim(key, owner, self.now, ttl=ttl, waited=waited)
        stored = self.results.get(key)
        if stored is not None and (ttl is None or self.now - stored[1] < ttl):
            assert claim.result is not None
            assert (claim.result.value, claim.result.stored_at) == stored
        elif self.is_live(key):
            assert claim == (None, False, None)
        elif key in self.failures and self.now - waited < self.failures[key][1]:
            assert claim == (None, False, self.failures[key][0])
        else:
            assert claim.is_owner
            self.leases[key] = owner, self.now + FLIGHT_LEASE_S
            self.failures.pop(key, None)

    @rule(key=KEYS, owner=OWNERS)
    def renew(self, key: str, owner: str) -> None:
        self.store.renew([key], owner, self.now)
        if self.leases.get(key, ("", 0))[0] == owner:
            self.leases[key] = owner, self.now + FLIGHT_LEASE_S

    @rule(key=KEYS, owner=OWNERS | st.just(NO_OWNER), fits=st.booleans())
    def land(self, key: str, owner: str, fits: bool) -> None:
        value = b"%d" % next(self.number)
        self.store.land(key, owner, value, "r1", self.now, max_bytes=1000 if fits else 1)
        if fits:
            self.results[key] = value, self.now
        self.end(key, owner, None if fits else NOT_SHARED)

    @rule(key=KEYS, owner=OWNERS, failure=st.sampled_from([None, "down", NOT_SHARED]))
    def abandon(self, key: str, owner: str, failure: str | None) -> None:
        self.store.abandon(key, owner, self.now, failure)
        self.end(key, owner, failure)

    def end(self, key: str, owner: str, failure: str | None) -> None:
        if key in self.leases and self.leases[key][0] == owner:
            del self.leases[key]
            if failure is not None:
                self.failures[key] = failure, self.now

    @rule(seconds=st.floats(0.1, 2 * FLIGHT_LEASE_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def size_is_exact(self) -> None:
        assert self.store.size() == sum(len(value) + len(key) + 2 for key, (value, _) in self.results.items())


def test_flights_have_one_owner_and_no_result_is_lost() -> None:
    run_state_machine_as_test(Flights, settings=settings(max_examples=scaled(60), stateful_step_count=30))


@settings(max_examples=scaled(30))
@given(st.lists(st.integers(1, 400), max_size=30))
def test_results_never_exceed_maximum_size(sizes: list[int]) -> None:
    store = ResultStore(IN_MEMORY)
    for number, size in enumerate(sizes):
        store.land(f"{number}", "one", bytes(size), "", 0.0, max_bytes=300)
        assert store.size() <= 300
        is_stored = store.claim(f"{number}", "one", 0.0).result is not None
        assert is_stored == (size + len(f"{number}") <= 300)
    store.close()


def test_clock_that_is_set_back_does_not_block_flight() -> None:
    store = ResultStore(IN_MEMORY)
    assert store.claim("a", "one", 10_000.0).is_owner
    assert store.claim("a", "two", 5_000.0).is_owner
    store.close()


async def test_equal_calls_are_made_once_and_marked() -> None:
    upstream = Upstream()
    first = await call(upstream.tool, {"word": "cat"}, "r1")
    hit = await call(upstream.tool, '{ "word":"cat" }', "r2")
    await call(upstream.tool, {"word": "dog"})
    assert upstream.calls == 2
    assert "cache" not in first.metrics
    assert (hit.response, hit.reward, hit.metrics["pages"]) == (first.response, 0.5, 3)
    assert hit.metrics["cache"]["origin"] == "r1"
    assert hit.metrics["cache"]["age_s"] >= 0
    assert "attempts" not in hit.metrics


async def test_concurrent_calls_share_one_flight() -> None:
    upstream = Upstream()
    upstream.ready.clear()
    calls = [asyncio.create_task(call(upstream.tool, {"word": "cat"})) for _ in range(8)]
    while not upstream.calls:
        await asyncio.sleep(0.001)
    upstream.ready.set()
    results = await asyncio.gather(*calls)
    assert upstream.calls == 1
    assert sorted("cache" in result.metrics for result in results) == [False] + [True] * 7


async def test_cancelled_call_is_made_by_another_caller() -> None:
    upstream = Upstream()
    upstream.ready.clear()
    calls = [asyncio.create_task(call(upstream.tool, {"word": "cat"})) for _ in range(3)]
    while not upstream.calls:
        await asyncio.sleep(0.001)
    calls[0].cancel()
    upstream.ready.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert [result.response.text for result in results[1:] if isinstance(result, ToolResult)] == ["CAT", "CAT"]
    assert upstream.calls == 2


async def test_infra_fault_reaches_waiters_and_is_not_stored() -> None:
    upstream = Upstream()
    upstream.ready.clear()
    upstream.error = InfraFault("down")
    calls = [asyncio.create_task(call(upstream.tool, {"word": "cat"})) for _ in range(8)]
    while not upstream.calls:
        await asyncio.sleep(0.001)
    upstream.ready.set()
    assert [str(error) for error in await asyncio.gather(*calls, return_exceptions=True)] == ["down"] * 8
    assert upstream.calls == 1
    assert (await call(upstream.tool, {"word": "cat"})).response.text == "CAT"


class Rejected(InfraFault):
    def __init__(self, *, status: int) -> None:
        super().__init__(f"Status {status}.")
        self.status = status


async def test_each_waiter_raises_its_own_copy_of_a_fault() -> None:
    upstream = Upstream()
    upstream.ready.clear()
    upstream.error = Rejected(status=503)
    upstream.error.metrics = {"queue_wait": 3}
    calls = [asyncio.create_task(call(upstream.tool, {"word": "cat"})) for _ in range(8)]
    while not upstream.calls:
        await asyncio.sleep(0.001)
    upstream.ready.set()
    faults = await asyncio.gather(*calls, return_exceptions=True)
    assert len(set(map(id, faults))) == 8
    assert [(type(fault), str(fault), vars(fault).get("status")) for fault in faults] == [
        (Rejected, "Status 503.", 503)
    ] * 8
    assert [getattr(fault, "metrics", None) for fault in faults] == [{"queue_wait": 3}] + [{}] * 7
    assert {getattr(fault, "__cause__", None) for fault in faults[1:]} == {faults[0]}


class WatchedStore(LocalStore):
    """Announces the first answer."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.answered = asyncio.Event()

    async def call(self, method: str, *args: Any) -> Any:
        answer = await super().call(method, *args)
        self.answered.set()
        return answer


UNSTORABLE = ToolResult(ToolResponse(text="CAT"), 0.0, {(1, 2): 3})  # type: ignore[dict-item]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    "outcome",
    [
        UNSTORABLE,
        ToolResult(ToolResponse(text="CAT"), 0.0, {"ended_by_deadline": True}),
        ValueError("no such page"),
        CallTimeout("no answer after 3 s"),
        SlotTimeout("too late"),
        BudgetExhausted("web", "requests", 1, 0),
    ],
    ids=lambda outcome: type(outcome).__name__,
)
async def test_waiters_of_unshared_outcome_call_at_once(
    outcome: ToolResult | Exception, processes: int, tmp_path: Path
) -> None:
    stores = [WatchedStore(str(tmp_path / "results.sqlite")) for _ in range(processes)]
    caches = [ResultCache(store, "test") for store in stores]
    ready, together, calls = asyncio.Event(), asyncio.Barrier(7), 0

    async def ask() -> ToolResult:
        nonlocal calls
        calls += 1
        await (ready.wait() if calls == 1 else together.wait())
        if isinstance(outcome, Exception):
            raise copy.copy(outcome)
        return outcome

    fetches = [
        asyncio.create_task(caches[number % processes].fetch("key", ask, CacheSettings(), "r1")) for number in range(8)
    ]
    try:
        async with asyncio.timeout(20):
            for store in stores:
                await store.answered.wait()
            ready.set()
            results = await asyncio.gather(*fetches, return_exceptions=True)
    finally:
        for cache in caches:
            cache.close()
    assert [(type(result), str(result)) for result in results] == [(type(outcome), str(outcome))] * 8
    if isinstance(outcome, BudgetExhausted):
        assert {(result.resource, result.unit) for result in results if isinstance(result, BudgetExhausted)} == {
            ("web", "requests")
        }


async def test_call_without_a_flight_is_stored(tmp_path: Path) -> None:
    upstream = Upstream()
    upstream.tool.cache = CacheSettings(path=str(tmp_path / "results.sqlite"))
    upstream.ready.clear()
    upstream.error = ValueError("no such page")
    calls = [asyncio.create_task(call(upstream.tool, {"word": "cat"})) for _ in range(3)]
    while not upstream.calls:
        await asyncio.sleep(0.001)
    upstream.ready.set()
    await asyncio.gather(*calls, return_exceptions=True)
    assert upstream.calls == 3
    close_result_caches()
    assert "cache" in (await call(upstream.tool, {"word": "cat"})).metrics


@pytest.mark.parametrize(
    ("error", "calls"), [(PolicyFault("No such word."), 1), (CallTimeout("Timed out."), 2), (ValueError("no page"), 2)]
)
async def test_only_policy_faults_are_stored(error: Exception, calls: int) -> None:
    upstream = Upstream()
    for _ in range(2):
        upstream.error = error
        with pytest.raises(type(error), match=str(error)):
            await call(upstream.tool, {"word": "cat"})
    assert upstream.calls == calls


async def test_hit_needs_no_slot_and_no_budget() -> None:
    limits = ResourceLimits(resource="test_hit_needs_no_slot", budget={"requests": 1})
    upstream = Upstream(limits=limits.model_dump())
    for _ in range(3):
        assert (await call(upstream.tool, {"word": "cat"})).response.text == "CAT"
    assert upstream.calls == 1


async def test_old_result_is_not_used() -> None:
    upstream = Upstream()
    upstream.tool.cache = CacheSettings(ttl=0.05)
    await call(upstream.tool, {"word": "cat"})
    await asyncio.sleep(0.06)
    assert "cache" not in (await call(upstream.tool, {"word": "cat"})).metrics
    assert upstream.calls == 2


@pytest.mark.parametrize("options", [{"version": "2"}, {"description": "Look up one word."}])
async def test_changed_tool_is_a_miss(options: dict[str, Any], tmp_path: Path) -> None:
    old, new = Upstream(), Upstream(**options)
    for upstream in (old, new):
        upstream.tool.cache = CacheSettings(path=str(tmp_path / "results.sqlite"))
        await call(upstream.tool, {"word": "cat"})
    assert (old.calls, new.calls) == (1, 1)
    close_result_caches()
    await call(new.tool, {"word": "cat"})
    assert new.calls == 1, "the file keeps the results"


async def test_small_limit_of_a_tool_keeps_results_of_others(tmp_path: Path) -> None:
    @tool(pure=True)
    def fetch(page: int) -> str:
        """Fetch a page.

        Args:
            page: Number of the page.
        """
        return f"{page}" * 300_000

    large, small = fetch, Upstream().tool
    path = str(tmp_path / "results.sqlite")
    large.cache, small.cache = CacheSettings(path=path), CacheSettings(path=path, max_mb=1)
    async with ToolInstance(large) as pages, ToolInstance(small) as words:
        for page in range(5):
            await pages.execute({"page": page})
        await words.execute({"word": "cat"})
    close_result_caches()
    assert "cache" in (await call(large, {"page": 0})).metrics


async def test_hidden_arguments_are_part_of_the_key() -> None:
    @tool(pure=True)
    def check(answer: str, truth: Hidden[str]) -> bool:
        """Check an answer.

        Args:
            answer: The answer.
        """
        return answer == truth

    for convert in (dict, lambda kwargs: {"create_kwargs": kwargs}):  # verl passes a single mapping
        assert (await call(check, {"answer": "4"}, **convert({"truth": "4"}))).response.text == "true"
        assert (await call(check, {"answer": "4"}, **convert({"truth": "5"}))).response.text == "false"


async def test_recreated_run_directory_is_another_run(tmp_path: Path) -> None:
    upstream, rollouts = Upstream(), tmp_path / "rollouts"
    upstream.tool.cache = CacheSettings(path=str(tmp_path / "results.sqlite"))
    for expected in (1, 1, 2):
        if expected == 2:
            shutil.rmtree(rollouts)
        configure_caches([upstream.tool], run_directory=rollouts, data="")
        await call(upstream.tool, {"word": "cat"})
        assert upstream.calls == expected
    assert [path.name for path in rollouts.iterdir()] == [RUN_ID_FILE]


def test_memory_of_small_results_is_bounded() -> None:
    memory = ResultMemory(max_bytes=1_000_000)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(10_000):
        memory.put(f"{number:064}", StoredResult(b"%056d" % number, f"{number:032}", float(number)))
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used < 1_100_000


async def test_images_are_cached(tmp_path: Path) -> None:
    picture = PIL.Image.effect_noise((32, 16), 50).convert("RGB")

    @tool(pure=True, returns_images=True)
    def draw() -> ToolResponse:
        """Draw a picture."""
        return ToolResponse(image=[picture])

    drawn, cached = [await call(draw, {}) for _ in range(2)]
    assert drawn.response.image
    assert cached.response.image
    assert "cache" in cached.metrics
    assert read_image(cached.response.image[0]) == read_image(picture)


async def test_unusable_file_does_not_fail_calls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "results.sqlite"
    file.write_text("This is not a database. " * 100)
    upstream = Upstream()
    upstream.tool.cache = CacheSettings(path=str(file))
    for _ in range(2):
        assert (await call(upstream.tool, {"word": "cat"})).response.text == "CAT"
    assert upstream.calls == 1, "the memory of the process still works"
    assert len([r for r in caplog.records if "without the cache" in r.message]) == 1


async def test_result_that_cannot_be_stored_is_returned(caplog: pytest.LogCaptureFixture) -> None:
    @tool(pure=True)
    def measure() -> tuple[str, float, dict[Any, Any]]:
        """Measure."""
        return "done", 1.0, {(1, 2): 3}

    for _ in range(2):
        assert (await call(measure, {})).metrics == {(1, 2): 3}
    assert "cannot be cached" in caplog.text


async def test_metrics_of_a_hit_have_the_types_of_the_record() -> None:
    metrics = {"score": np.float32(0.5), "pages": np.int64(3), "is_new": np.bool_(True), "row": np.arange(2)}

    @tool(pure=True)
    def measure() -> ToolResult:
        """Measure."""
        return ToolResult(ToolResponse(text="done"), None, {**metrics, "path": Path("a"), "ids": {7}})

    first, hit = [(await call(measure, {})).metrics for _ in range(2)]
    assert hit.pop("cache")
    assert hit == decode(encode(first))
    assert (hit["score"], hit["pages"], hit["is_new"], hit["row"]) == (0.5, 3, True, [0, 1])


async def test_any_text_of_a_fault_reaches_the_caller() -> None:
    upstream = Upstream()
    upstream.error = InfraFault("down \ud800")
    with pytest.raises(InfraFault, match="down"):
        await call(upstream.tool, {"word": "cat"})


def test_function_with_state_is_not_pure(tmp_path: Path) -> None:
    def count(state: Hidden[dict[str, Any]]) -> int:
        """Count the calls."""
        return len(state)

    with pytest.raises(ConfigError, match="not pure"):
        tool(pure=True)(count)


async def test_config_file_turns_cache_on_and_off(tmp_path: Path) -> None:
    config = tmp_path / "tools.yaml"
    config_line = "    config: {type: native, sandbox_fusion_url: 'http://127.0.0.1:8080'}\n"
    entry = f"tools:\n  - class_name: toolroll.SandboxFusionTool\n{config_line}"
    found = []
    for line in ("", "    cache: {scope: dataset, ttl: 60}\n", "    cache: false\n"):
        config.write_text(entry + line)
        found.append(initialize_tools_from_config(config)[0].cache)
    assert found == [None, CacheSettings(scope="dataset", ttl=60), None]
    config.write_text(entry + "    cache: {scope: week}\n")
    with pytest.raises(ConfigError, match="cache"):
        initialize_tools_from_config(config)


class PureLookUp(BaseTool[str]):
    """A pure tool with a hidden argument."""

    default_schema: ClassVar = {"type": "function", "function": {"name": "look_up", "description": "Look up a word."}}
    pure = True

    def new_state(self, source: str = "") -> str:
        return source

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        return ToolResult(ToolResponse(text="cat"), None, {})


def test_cache_of_a_tool_with_state_is_refused() -> None:
    entry = ToolEntry(class_name="", cache=CacheSettings())
    interpreter = SandboxFusionTool({"sandbox_fusion_url": "http://127.0.0.1:8080", "stateful": True})
    for stateful in (Gsm8kTool(), interpreter):
        with pytest.raises(ConfigError, match=rf"results of '{stateful.name}' may depend on the trajectory"):
            set_cache(stateful, entry, Path())
    pure = PureLookUp()
    set_cache(pure, entry, Path())
    assert pure.cache == CacheSettings()


async def test_slot_timeout_of_a_caller_is_not_that_of_others() -> None:
    upstream = Upstream()
    upstream.ready.clear()
    upstream.error = SlotTimeout("too little time")
    calls = [asyncio.create_task(call(upstream.tool, {"word": "cat"})) for _ in range(3)]
    while not upstream.calls:
        await asyncio.sleep(0.001)
    upstream.ready.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[0], SlotTimeout)
    assert [result.response.text for result in results[1:] if isinstance(result, ToolResult)] == ["CAT", "CAT"]


@pytest.mark.parametrize("is_marked", [False, True])
async def test_fault_at_a_deadline_is_not_that_of_others(is_marked: bool) -> None:
    """The service needs 0.2 s. The first caller has less time, and the tool may give up long before its deadline."""
    has_begun = asyncio.Event()

    class SlowLookUp(PureLookUp):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
            has_begun.set()
            remaining_s = kwargs["deadline"] - time.monotonic()
            await asyncio.sleep(min(0.2, remaining_s))
            if remaining_s > 10:
                return ToolResult(ToolResponse(text="CAT"), None, {})
            fault = InfraFault("too little time")
            fault.depends_on_deadline = is_marked
            raise fault

    look_up = SlowLookUp()

    async def ask(remaining_s: float) -> ToolResult:
        async with ToolInstance(look_up) as instance:
            return await instance.execute({}, deadline=time.monotonic() + remaining_s)

    first = asyncio.create_task(ask(5 if is_marked else 0.1))
    await has_begun.wait()
    results = await asyncio.gather(first, ask(30), ask(30), return_exceptions=True)
    assert isinstance(results[0], InfraFault)
    assert [result.response.text for result in results[1:] if isinstance(result, ToolResult)] == ["CAT", "CAT"]


SHORTENED = fault_server.answer(body=fault_server.program(status="TimeLimitExceeded"))


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("script", "within_s", "depends"),
    [
        ([fault_server.hang()], 5, True),
        ([fault_server.answer(429, b"full", {"Retry-After": "20"})], 5, True),
        ([fault_server.after(3, fault_server.answer()), SHORTENED], 5, True),
        ([fault_server.answer(500, b"Internal Server Error")], 60, False),
    ],
    ids=["no answer", "Retry-After", "waited for a slot", "broken"],
)
async def test_sandbox_fault_depends_on_deadline(
    script: list[fault_server.Behaviour], within_s: float, depends: bool
) -> None:
    async with fault_server.FaultServer(script) as server:
        sandbox = LimitedSandbox(LimitedSandboxSettings(sandbox_fusion_url=server.url, rate_limit=1))
        others = [asyncio.create_task(sandbox.run("1", run_timeout=5)) for _ in script[1:]]
        await asyncio.sleep(0.1)
        with pytest.raises(SandboxUnavailable) as caught:
            await sandbox.run("2", run_timeout=5, deadline=time.monotonic() + within_s)
        await asyncio.gather(*others)
    assert caught.value.depends_on_deadline is depends


@pytest.mark.virtual_time
async def test_program_shortened_by_cache_wait_is_infra_fault() -> None:
    """The first call ends at its deadline, so the second one runs its program, with half of its time left."""
    async with fault_server.FaultServer([fault_server.after(1, SHORTENED), SHORTENED]) as server:
        interpreter = SandboxFusionTool({"sandbox_fusion_url": server.url, "default_timeout": 5})
        interpreter.cache = CacheSettings()

        async def run(remaining_s: float) -> ToolResult:
            async with ToolInstance(interpreter) as instance:
                return await instance.execute({"code": "1"}, deadline=time.monotonic() + remaining_s)

        first = asyncio.create_task(run(3))
        await asyncio.sleep(0.1)
        with pytest.raises(SandboxUnavailable, match="s for an equal call") as caught:
            await run(3.1)
    found = re.search(r"(\d+\.\d) s for an equal call", str(caught.value))
    assert found
    assert float(found[1]) >= 0.8
    assert caught.value.depends_on_deadline
    assert (await first).metrics["ended_by_deadline"]


async def test_odd_text_of_a_fault_does_not_disable_the_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    upstream = Upstream()
    upstream.tool.cache = CacheSettings(path=str(tmp_path / "results.sqlite"))
    upstream.error = InfraFault("down \ud800")
    with pytest.raises(InfraFault, match="down"):
        await call(upstream.tool, {"word": "cat"})
    await call(upstream.tool, {"word": "cat"}, "\ud800")
    close_result_caches()
    assert "cache" in (await call(upstream.tool, {"word": "cat"})).metrics
    assert caplog.records == []


async def test_store_that_hangs_delays_only_the_first_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "STORE_TIMEOUT_S", 0.1)
    ends, claims = threading.Event(), []

    def hang(*args: Any, **kwargs: Any) -> None:
        claims.append(args)
        ends.wait()

    monkeypatch.setattr(ResultStore, "claim", hang)
    upstream = Upstream()
    upstream.tool.cache = CacheSettings(path=str(tmp_path / "results.sqlite"))
    try:
        async with asyncio.timeout(5):
            for number in range(100):
                assert (await call(upstream.tool, {"word": f"cat{number}"})).response.text == f"CAT{number}"
    finally:
        ends.set()
    assert (upstream.calls, len(claims)) == (100, 1)
    assert [record.getMessage() for record in caplog.records] == [
        f"Tools are called without the cache: {tmp_path / 'results.sqlite'}: no answer within 5 s"
    ]


async def test_image_of_a_cancelled_call_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call has ended when its caller is cancelled, and only the encoding is missing."""
    encoding, continues = threading.Event(), threading.Event()
    encode_outcome = result_cache.encode_outcome

    def encode(outcome: Any) -> bytes:
        encoding.set()
        continues.wait()
        return encode_outcome(outcome)

    monkeypatch.setattr(result_cache, "encode_outcome", encode)
    calls = 0

    @tool(pure=True, returns_images=True)
    def draw() -> ToolResponse:
        """Draw a picture."""
        nonlocal calls
        calls += 1
        return ToolResponse(image=[PIL.Image.new("RGB", (4, 4))])

    drawing = asyncio.create_task(call(draw, {}))
    await asyncio.to_thread(encoding.wait)
    drawing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drawing
    continues.set()
    async with asyncio.timeout(FLIGHT_LEASE_S / 2):
        assert "cache" in (await call(draw, {})).metrics
    assert calls == 1


def test_full_disk_leaves_the_store_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResultStore(IN_MEMORY)
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages + 10}")
    for number in range(3):
        with pytest.raises(sqlite3.OperationalError, match="full"):
            store.land(f"{number}", "one", bytes(100_000), "", 0.0, max_bytes=10**6)
    store.land("small", "one", b"1", "", 0.0, max_bytes=10**6)
    assert store.claim("small", "one", 0.0).result is not None
    assert store.size() < 100
    store.close()
