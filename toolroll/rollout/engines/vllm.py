"""VLLMEngine: samples by vLLM, ids in and ids out.

Where the server has it (`vllm serve --enable-scale-out`), by `/inference/v1/generate`: what an aborted call has comes
back with it, and the weights' version. Elsewhere by `/v1/completions`, where an aborted call ends without ids.

The log-probabilities are the model's own at T = 1, before temperature and top_p, as is vLLM's default. A server with
`--logprobs-mode processed_logprobs` gives those of the distribution that was sampled from: say so by `logprobs_of`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, Self

from toolroll.errors import EngineRefused
from toolroll.rollout.engines.call import Call, Notice
from toolroll.rollout.engines.engine import Finish, Generation, SamplingParams
from toolroll.rollout.engines.sampling import check_ids, most_tokens, paired, weights_of
from toolroll.rollout.engines.servers import MAX_CONNECTIONS, Servers, by, timings_of

FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT, "repetition": Finish.LENGTH}
"""Text that repeats itself was cut off by the server, as a long one is: the model didn't end it."""


class VLLMEngine:
    """Samples by vLLM, at one server or several. Any event loop may use it, and it pickles.

    Args:
        urls: Base URLs, e.g. `http://127.0.0.1:8000`.
        model: Which of the served models, or adapters. By default the server's first.
        logprobs_of: As the servers' `--logprobs-mode` has it: "raw", or "scaled" for processed ones.
        vocab_size: Ids from it up are refused. By default vLLM refuses them itself.
        token: The server's `--api-key`.
        max_connections: Per server and event loop; more calls wait for one.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        model: str | None = None,
        logprobs_of: Literal["scaled", "raw"] = "raw",
        vocab_size: int | None = None,
        token: str | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.logprobs_of = logprobs_of
        self._servers = Servers(urls, token=token, max_connections=max_connections)
        self._vocab_size = vocab_size
        self._model = {} if model is None else {"model": model}
        self._takes_tokens = True
        """Whether the servers have `/inference/v1/generate`, until one says that it hasn't."""

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        deadline: float | None = None,
        affinity: str | None = None,
    ) -> Generation:
        """Sample. `sampling_params` are vLLM's own, but for `max_new_tokens`."""
        most, until = most_tokens(sampling_params), by(deadline)
        check_ids(prompt_ids, self._vocab_size)
        params = {key: value for key, value in sampling_params.items() if key != "max_new_tokens"}
        params |= {"max_tokens": most, "logprobs": 0, "skip_special_tokens": False}

        def by_tokens(attempt_id: str) -> dict[str, Any]:
            return {"request_id": attempt_id, **self._model, "token_ids": list(prompt_ids), "sampling_params": params}

        def by_completion(attempt_id: str) -> dict[str, Any]:
            prompt = {"prompt": list(prompt_ids), "return_token_ids": True}
            return {"request_id": attempt_id, **self._model, **prompt, **params}

        call = Call(request_id, "/v1/completions", by_completion, _completion, until, affinity)
        if self._takes_tokens:
            first = Call(request_id, "/inference/v1/generate", by_tokens, _generation, until, affinity, _abort)
            try:
                return await self._servers.generate(first)
            except EngineRefused as refusal:
                if refusal.status != 404:
                    raise
            self._takes_tokens, call.aborted = False, first.aborted
        return await self._servers.generate(call)

    async def abort(self, request_id: str) -> None:
        """Stop a call. It ends with what it has, as ABORT. One that isn't there is no error."""
        await self._servers.abort([request_id])

    async def abort_many(self, request_ids: Collection[str]) -> None:
        """The same for many at once."""
        await self._servers.abort(request_ids, _abort)

    async def context_length(self) -> int | None:
        """How many ids a prompt and its answer may have together; None where the server doesn't say."""
        return await self._servers.context_length()

    async def health(self) -> dict[str, bool]:
        """Which of the servers are up, by their URLs."""
        return await self._servers.everywhere("/health")

    async def close(self) -> None:
        """Close the connections of this event loop."""
        await self._servers.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *why: object) -> None:
        await self.close()


def _generation(answer: Any, call: Call[Any]) -> Generation:
    [choice] = answer["choices"]
    return _read(answer, choice, [entry["logprob"] for entry in choice["logprobs"]["content"] or ()], call)


def _completion(answer: Any, call: Call[Any]) -> Generation:
    [choice] = answer["choices"]
    if choice.get("token_ids") is None:
        raise ValueError("no token_ids in it: is this vLLM too old to know return_token_ids?")
    return _read(answer, choice, choice["logprobs"]["token_logprobs"], call)


def _read(answer: Any, choice: Any, logprobs: list[float], call: Call[Any]) -> Generation:
    finish = FINISH[choice["finish_reason"]]
    ids, logprobs = paired(choice["token_ids"], logprobs, finish)
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return Generation(
        ids=ids,
        logprobs=logprobs,
        finish=finish,
        **weights_of(choice.get("weight_versions")),
        endpoint=call.endpoint,
        timings=timings_of(call, cached_tokens=details.get("cached_tokens")),
    )


def _abort(*attempt_ids: str) -> Notice:
    return "/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{one}" for one in attempt_ids]}
