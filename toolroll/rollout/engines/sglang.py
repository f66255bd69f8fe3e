"""SGLangEngine: samples by SGLang's own `/generate`, ids in and ids out.

    async with SGLangEngine(["http://10.0.0.1:30000", "http://10.0.0.2:30000"]) as engine:
        generation = await engine.generate("t7/0", ids, {"max_new_tokens": 512, "temperature": 1.0}, affinity="t7")

The ids are those that were sampled, the stop token with them, and each has its log-probability under the distribution
that it was sampled from. What an aborted call has comes back with it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Sequence
from os import PathLike, fspath
from typing import Any, Literal, Self, TypeVar

from toolroll.errors import EngineRefused
from toolroll.rollout.engines.call import Call, Notice
from toolroll.rollout.engines.engine import Finish, Generation, SamplingParams
from toolroll.rollout.engines.sampling import check_ids, most_tokens, paired, weights_of
from toolroll.rollout.engines.servers import MAX_CONNECTIONS, Servers, by, timings_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

UPDATE_TIME = 1800.0
"""Seconds in which a server loads weights: hundreds of gigabytes from a shared disk take minutes."""


class SGLangEngine:
    """Samples by SGLang, at one server or several. Any event loop may use it, and it pickles.

    Args:
        urls: Base URLs, e.g. `http://127.0.0.1:30000`.
        vocab_size: Ids from it up are refused, since SGLang dies of them. By default the server is asked.
        token: The server's `--api-key`.
        max_connections: Per server and event loop; more calls wait for one.
    """

    logprobs_of: Literal["scaled", "raw"] = "scaled"

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        vocab_size: int | None = None,
        token: str | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._servers = Servers(urls, token=token, max_connections=max_connections)
        self._vocab_size = vocab_size
        self._knows_vocab_size = vocab_size is not None

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        deadline: float | None = None,
        affinity: str | None = None,
    ) -> Generation:
        """Sample. `sampling_params` are SGLang's own; one that it doesn't know is refused."""
        most_tokens(sampling_params)
        params = {**sampling_params, "skip_special_tokens": False, "no_stop_trim": True}
        call = self._call(request_id, prompt_ids, params, deadline, _generation)
        call.affinity, call.abort = affinity, _abort_one
        return await self._servers.generate(call)

    async def score(self, ids: Sequence[int], *, start: int = 1, deadline: float | None = None) -> list[float]:
        """The log-probability at T = 1 of each id from `start` on, given all before it.

        It is computed in one piece, as a trainer does it, and not token by token, as when sampling.
        """
        if not 1 <= start < len(ids):
            raise EngineRefused(f"start is {start}; of {len(ids)} ids those from 1 to {len(ids) - 1} can be scored.")
        # The first of those that it gives has none: what was before it isn't looked at.
        params = {"max_new_tokens": 0, "temperature": 1.0}
        return await self._servers.ask(self._call("score", ids, params, deadline, _scores, since=start - 1))

    async def abort(self, request_id: str) -> None:
        """Stop a call. It ends with what it has, as ABORT. One that isn't there is no error."""
        await self._servers.abort([request_id])

    async def abort_many(self, request_ids: Collection[str]) -> None:
        """The same for many at once."""
        await self._servers.abort(request_ids)

    async def context_length(self) -> int | None:
        """How many ids a prompt and its answer may have together; None where the server doesn't say."""
        return await self._servers.context_length()

    async def abort_all(self) -> None:
        """Stop whatever the servers run, for others too: before new weights, say."""
        await self._servers.abort_all(("/abort_request", {"abort_all": True}))

    async def update_weights(self, model_path: str | PathLike[str], version: str) -> None:
        """Have every server load weights from a directory, which each must see under this path.

        What is sampled from then on carries the version. Raises EngineUnavailable where a server didn't load them; the
        others have them then. A server ends the calls that it has before, and begins no others: pause the rollout, or
        the weights wait for the longest.
        """
        body = {"model_path": fspath(model_path), "weight_version": version}
        # A call that has just ended is in SGLang's batch for a moment more, and its cache isn't emptied then: the new
        # weights would go on from what the old ones left there, under the old version.
        busy = "cache was not flushed"
        await self._servers.tell_all("/update_weights_from_disk", body, within=UPDATE_TIME, busy=busy)

    async def health(self) -> dict[str, bool]:
        """Which of the servers can sample, by their URLs. It takes seconds: each samples a token."""
        return await self._servers.everywhere("/health")

    async def close(self) -> None:
        """Close the connections of this event loop."""
        await self._servers.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *why: object) -> None:
        await self.close()

    def _call(
        self,
        name: str,
        prompt_ids: Sequence[int],
        params: dict[str, Any],
        deadline: float | None,
        parse: Callable[[Any, Call[Any]], T],
        since: int = -1,
    ) -> Call[T]:
        """A call of `/generate`. It gives log-probabilities of the prompt's ids too, from `since` on."""
        until = by(deadline)

        async def check() -> None:
            check_ids(prompt_ids, self._vocab_size if self._knows_vocab_size else await self._ask_vocab_size(until))

        def body(attempt_id: str) -> dict[str, Any]:
            wanted = {"return_logprob": True, "logprob_start_len": since}
            return {"rid": attempt_id, "input_ids": list(prompt_ids), "sampling_params": params, **wanted}

        return Call(name, "/generate", body, parse, until, check=check)

    async def _ask_vocab_size(self, deadline: float) -> int | None:
        """How many ids there are; None if there is no way to know. All calls wait for the one that asks."""
        pool = await self._servers.pool()
        async with pool.once:
            if not self._knows_vocab_size:
                self._vocab_size = await self._read_vocab_size(deadline)
                self._knows_vocab_size = True
        return self._vocab_size

    async def _read_vocab_size(self, deadline: float) -> int | None:
        """SGLang says it in one place: where it refuses a bias for an id outside, before anything is sampled.

        An old version, which has no `/model_info`, may not look at it, and die of the question.
        """
        outside = {"max_new_tokens": 1, "logit_bias": {str(2**31 - 1): 0.0}}
        asking = {"input_ids": [0], "sampling_params": outside}
        try:
            await self._servers.ask(Call("model", "/model_info", None, _nothing, deadline))
            await self._servers.ask(Call("vocabulary", "/generate", lambda _: asking, _nothing, deadline))
        except EngineRefused as refusal:
            if found := re.search(r"keys in \[0, (\d+)\]", str(refusal)):
                return int(found[1]) + 1
            if refusal.status in (401, 403):
                raise
        logger.warning(
            "%s doesn't say how many ids there are. Give vocab_size: it dies of one outside.", self._servers.urls[0]
        )
        return None


def _generation(answer: Any, call: Call[Any]) -> Generation:
    meta = answer["meta_info"]
    finish = Finish(meta["finish_reason"]["type"])
    ids, logprobs = paired(answer["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]], finish)
    return Generation(
        ids=ids,
        logprobs=logprobs,
        finish=finish,
        **weights_of(meta.get("weight_versions"), meta.get("weight_version")),
        endpoint=call.endpoint,
        timings=timings_of(call, queue=meta.get("queue_time"), cached_tokens=meta.get("cached_tokens")),
    )


def _scores(answer: Any, call: Call[Any]) -> list[float]:
    return [float(entry[0]) for entry in answer["meta_info"]["input_token_logprobs"][1:]]


def _nothing(answer: Any, call: Call[Any]) -> None:
    """Nobody looks at it."""


def _abort_one(attempt_id: str) -> Notice:
    # SGLang stops all calls whose ids begin so. An attempt's id ends in a number of its own: none begins with another.
    return "/abort_request", {"rid": attempt_id}
