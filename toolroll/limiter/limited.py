"""Use limits around pieces of work: the `limited` decorator, `charge`, and the context manager behind both.

    @limited(resource="judge", limit={"min": 4, "max": 64}, budget={"usd": 20}, cost={"usd": 0.01})
    async def ask_judge(question: str) -> str:
        answer = await client.post(...)
        charge(usd=answer.price)
        return answer.text

Tools, reward functions and engines with `limits` use `LimitedUse`, so `charge` works in all of them.

Invariants:

- A slot is held while the work runs, including the thread of a sync tool whose caller was cancelled.
- The wait for a slot ends by the deadline of the surrounding tool call or reward function (`within_deadline`).
- The limits of a resource are declared once in a process. Functions that only name the resource use them.
- No limited work starts in a thread of `call_in_thread` after its caller was cancelled.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from toolroll.errors import ConfigError, validate
from toolroll.limiter.ledger.policy import rename_calls
from toolroll.limiter.registry import get_limiter, has_limiter
from toolroll.limiter.settings import ResourceLimits

if TYPE_CHECKING:
    from toolroll.limiter.slot import Slot

P = ParamSpec("P")
T = TypeVar("T")

LIMITS_ATTRIBUTE = "__limits__"
"""Attribute of a function with `limited` that contains its limits, with the name of the resource."""

_uses: ContextVar[tuple[LimitedUse, ...]] = ContextVar("toolroll_limited_uses", default=())
"""Limited blocks around the running code, innermost last."""
_deadline: ContextVar[float | None] = ContextVar("toolroll_limited_deadline", default=None)
_caller_cancelled: ContextVar[Future[None] | None] = ContextVar("toolroll_limited_caller_cancelled", default=None)
"""In a thread of `call_in_thread`: future that ends when its caller is cancelled."""
_cache_wait_s: ContextVar[float] = ContextVar("toolroll_cache_wait", default=0.0)
_declared: dict[str, tuple[ResourceLimits, str]] = {}
"""Limits of each resource that a function with `limited` declares, and the name of the function."""


class LimitedUse:
    """One use of a limited resource: acquires a slot by `async with`, or by `with` in a thread.

    Args:
        limits: Limits of the resource.
        name: Name of the resource if the limits have none.
        cost: Estimated cost of the use. `limits.cost` overrides its units, or that of the declared limits if
            `limits` only names the resource and has no cost.
        deadline: Time by which the work must be done, on the clock of `time.monotonic()`. The earlier one of this and
            of the surrounding `within_deadline` applies.

    Raises:
        SlotTimeout: On entering, if no slot became free before the deadline.
        LimiterUnavailable: On entering, if the cluster's limiter could not be reached before the deadline.
        BudgetExhausted: On entering, if the budget of the resource is spent.

    Example:
        >>> async def main() -> float:
        ...     async with LimitedUse(ResourceLimits(limit=2), "search") as use:
        ...         charge(requests=1)
        ...         return use.waited
        >>> asyncio.run(main()) < 1
        True
    """

    def __init__(
        self,
        limits: ResourceLimits,
        name: str,
        *,
        cost: Mapping[str, float] | None = None,
        deadline: float | None = None,
    ) -> None:
        self.waited = 0.0
        """Time until the slot was acquired, or until acquiring it failed, in seconds."""
        self._limits = limits
        self._name = name
        self._cost = cost or {}
        self._given_deadline = deadline
        self._slot: Slot | None = None
        self._token: Token[tuple[LimitedUse, ...]] | None = None
        self._running: list[Future[Any]] = []

    @property
    def slot(self) -> Slot:
        """The acquired slot."""
        assert self._slot is not None, "the slot is acquired by `async with` or `with`"
        return self._slot

    async def __aenter__(self) -> Self:
        started, slot = time.monotonic(), self._new_slot()
        try:
            await slot.__aenter__()
        finally:
            self.waited = time.monotonic() - started
        return self._enter(slot)

    async def __aexit__(self, *exc_info: Any) -> None:
        self.__exit__(*exc_info)

    def __enter__(self) -> Self:
        started, slot = time.monotonic(), self._new_slot()
        try:
            slot.acquire_blocking(_caller_cancelled.get())
        finally:
            self.waited = time.monotonic() - started
        return self._enter(slot)

    def __exit__(self, *exc_info: Any) -> None:
        try:
            if self._token is not None:
                _uses.reset(self._token)
        finally:  # also if the block ends in another context than it began
            self._token = None
            self._release(exc_info)

    def limits_unit(self, unit: str) -> bool:
        """Return True if the limits have a rate or a budget of a unit."""
        policy = _resolve(self._limits).policy()
        return unit in policy.rates or unit in policy.budgets

    def keep_until(self, work: Future[Any]) -> None:
        """Keep the slot until a future ends, even if the block ends earlier."""
        self._running.append(work)

    def _new_slot(self) -> Slot:
        outer = _deadline.get()
        deadlines = [deadline for deadline in (self._given_deadline, outer) if deadline is not None]
        limits = _resolve(self._limits)
        limiter = get_limiter(limits.resource or self._name, limits)
        return limiter.acquire({**self._cost, **limits.cost}, deadline=min(deadlines, default=None))

    def _enter(self, slot: Slot) -> Self:
        self._slot = slot
        self._token = _uses.set((*_uses.get(), self))
        return self

    def _release(self, exc_info: tuple[Any, ...]) -> None:
        """Release the slot, now or when the last future has ended."""
        running = next((future for future in self._running if not future.done()), None)
        if running is None:
            self.slot.__exit__(*exc_info)
        else:
            running.add_done_callback(lambda _: self._release(exc_info))


def limited(
    limits: ResourceLimits | Mapping[str, Any] | None = None, /, **fields: Any
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Limit the calls of a function: concurrent calls, rates and budgets.

    Every call acquires a slot and pays `cost` before the function starts. The function can state its true cost with
    `charge`. A sync function waits in its thread, so it cannot be called from a coroutine directly: call it in a thread
    (`await asyncio.to_thread(function, …)`), or declare it with `async def`. A rollout calls sync reward functions with
    limits in a thread.

    Declare the limits of a resource once. Other functions use it by its name alone: `@limited(resource="judge")`.

    Args:
        limits: Limits of the function.
        **fields: Fields of `ResourceLimits`, which override those of `limits`. The default `resource` is the name of
            the function.

    Returns:
        A decorator for sync and async functions.

    Raises:
        ConfigError: If the limits are invalid, if another function has declared other limits of the resource, or if
            the decorated object is not a function or is a generator. On calling the function, if it only names a
            resource whose limits are not declared in this process.
        SlotTimeout: On calling the function, if no slot became free before the deadline of the surrounding tool call
            or reward function.
        LimiterUnavailable: On calling the function, if the cluster's limiter could not be reached before it.
        BudgetExhausted: On calling the function, if the budget of the resource is spent.

    Example:
        >>> @limited(limit=8, rpm=600)
        ... def look_up(word: str) -> str:
        ...     return word.upper()
        >>> look_up("limit")
        'LIMIT'
    """
    if callable(limits):
        raise ConfigError("limited: expected limits, got a function. Write @limited(limit=8), for example.")
    given = limits.model_dump(exclude_unset=True) if isinstance(limits, ResourceLimits) else dict(limits or {})
    read = validate(ResourceLimits, {**given, **fields}, "limited")

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        if not callable(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(f"limited: expected a function that is not a generator, got {function!r:.80}.")
        unwrapped = _unwrap_partial(function)
        resource = read.resource or str(getattr(unwrapped, "__name__", type(unwrapped).__name__))
        named = read.model_copy(update={"resource": resource})
        wrapper = _wrap_async(function, named) if _is_async(function) else _wrap_sync(function, named)
        setattr(wrapper, LIMITS_ATTRIBUTE, named)
        if named.has_limits:
            _declare(resource, named, owner=_full_name(unwrapped))
        return wrapper

    return decorate


def charge(**cost: float) -> None:
    """Set the true cost of the current call of a limited tool, reward function or function with `limited`.

    Without it, a call costs the estimate in its limits. If limited calls are nested, each unit is charged to the
    innermost one whose limits have a rate or a budget of the unit, or else to the innermost one. Outside of limited
    calls it does nothing, so the same code can be tested without limits.

    Args:
        **cost: Amount of each unit, e.g. `tokens=1180`. The last amount of a unit counts.

    Example:
        >>> charge(tokens=1180, usd=0.002)
    """
    uses = _uses.get()
    if not uses:
        return
    for unit, amount in rename_calls(cost).items():
        use = next((use for use in reversed(uses) if use.limits_unit(unit)), uses[-1])
        use.slot.correct(**{unit: amount})


def slot_wait_s() -> float:
    """Return how long the innermost limited block around the running code waited for its slot, in seconds."""
    uses = _uses.get()
    return uses[-1].waited if uses else 0.0


@contextmanager
def after_cache_wait(seconds: float) -> Iterator[None]:
    """Let `cache_wait_s` return this time in the block: how long a tool call waited for an equal call."""
    token = _cache_wait_s.set(seconds)
    try:
        yield
    finally:
        _cache_wait_s.reset(token)


def cache_wait_s() -> float:
    """Return how long the tool call around the running code waited for an equal call, in seconds."""
    return _cache_wait_s.get()


@contextmanager
def within_deadline(deadline: float | None) -> Iterator[None]:
    """Bound the waits for slots in the block by a deadline.

    Args:
        deadline: Time on the clock of `time.monotonic()`, or None for no further bound.
    """
    outer = _deadline.get()
    deadlines = [one for one in (deadline, outer) if one is not None]
    token = _deadline.set(min(deadlines, default=None))
    try:
        yield
    finally:
        _deadline.reset(token)


async def call_in_thread(executor: Executor, function: Callable[[], T]) -> T:
    """Call a function in a thread.

    A thread cannot be cancelled. If the caller is, the slots of its limited calls are kept until the function returns.
    Limited calls that the function starts from then on, or that wait for a slot, raise CancelledError in the thread.

    Args:
        executor: Executor with the threads.
        function: Function without arguments. It runs in a copy of the caller's context.

    Returns:
        The result of the function.
    """
    context, ended, cancelled = contextvars.copy_context(), Future[None](), Future[None]()
    context.run(_caller_cancelled.set, cancelled)

    def call() -> T:
        if not ended.set_running_or_notify_cancel():
            raise asyncio.CancelledError
        try:
            return context.run(function)
        finally:
            ended.set_result(None)

    for use in _uses.get():
        use.keep_until(ended)
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, call)
    except BaseException:
        ended.cancel()  # has no effect if the function has started
        cancelled.set_result(None)
        raise


def limits_of(function: Any) -> ResourceLimits | None:
    """Return the limits of a function with `limited`, also if it is wrapped by `functools.partial`, or None."""
    limits: ResourceLimits | None = getattr(_unwrap_partial(function), LIMITS_ATTRIBUTE, None)
    return limits


def blocks_for_slot(function: Any) -> bool:
    """Return True if a call of the function may block its thread until a slot becomes free."""
    return limits_of(function) is not None and not _is_async(function)


def declared_limits() -> dict[str, ResourceLimits]:
    """Return the limits that functions with `limited` declare in this process, by resource."""
    return {resource: limits for resource, (limits, _) in _declared.items()}


def _declare(resource: str, limits: ResourceLimits, owner: str) -> None:
    """Record the limits of a resource. The function that declared them may change them, e.g. in a notebook."""
    declared, first_owner = _declared.get(resource, (limits, owner))
    if owner != first_owner and limits.policy() != declared.policy():
        problem = f"Different limits of {resource!r}: {first_owner} has {declared.policy()}, {owner} {limits.policy()}."
        raise ConfigError(f"{problem} Declare the limits once; elsewhere write `@limited(resource={resource!r})`.")
    if owner == first_owner:
        _declared[resource] = limits, owner


def _resolve(limits: ResourceLimits) -> ResourceLimits:
    """Return the limits of a resource: the declared ones if the given ones only name it."""
    if limits.has_limits or limits.resource not in _declared:
        return limits
    declared, _ = _declared[limits.resource]
    return declared.model_copy(update={"cost": limits.cost or declared.cost})


def _check_declared(limits: ResourceLimits) -> None:
    """Raise ConfigError if limits only name a resource to which neither a function nor e.g. a tool gave limits."""
    resource = str(limits.resource)
    if not (limits.has_limits or resource in _declared or has_limiter(resource)):
        problem = f"No limits are declared for {resource!r}."
        raise ConfigError(f"{problem} Import the module that declares them, or give limits.")


def _full_name(function: Any) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _wrap_async(function: Callable[P, Any], limits: ResourceLimits) -> Callable[P, Any]:
    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        _check_declared(limits)
        async with LimitedUse(limits, ""):
            return await function(*args, **kwargs)

    return call


def _wrap_sync(function: Callable[P, T], limits: ResourceLimits) -> Callable[P, T]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if _is_in_event_loop():
            raise RuntimeError(
                f"A call of {limits.resource!r} may wait for a slot and would block the event loop. Call it with "
                "`await asyncio.to_thread(function, …)`, or declare the function with `async def`."
            )
        _check_declared(limits)
        with LimitedUse(limits, ""):
            result = function(*args, **kwargs)
        if inspect.isawaitable(result):
            raise TypeError(f"{limits.resource!r} returned an awaitable. Declare the function with `async def`.")
        return result

    return call


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _unwrap_partial(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function
