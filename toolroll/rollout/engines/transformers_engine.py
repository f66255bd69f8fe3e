"""Token engine that runs the model in this process, with Hugging Face transformers.

It is for laptops, tests and debugging: it needs no server and no GPU, but it is slower than SGLang or vLLM, and does
not cache the prompts of earlier turns.

One thread runs the model. Requests that wait when it looks for work become a *batch*, which is decoded together;
batches take turns, one token each. So a request starts at once, and a long one does not delay the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any

from toolroll.errors import ConfigError, EngineRefused, EngineUnavailable, MissingExtra
from toolroll.rollout.chat.model_files import check_model_path
from toolroll.rollout.engines.base import FinishType, Generation, GenerationTimings, LogprobsMode, SamplingParams
from toolroll.rollout.engines.sampling import check_prompt_ids, check_sampling_params

logger = logging.getLogger(__name__)

IDLE_S = 60.0
"""Time after which a thread without work ends. The next request starts another one."""
DEFAULT_MAX_BATCH = 16
PARAMETERS = {
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "logit_bias",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
}


@dataclass(eq=False)
class _Request:
    """A request of `generate`, and what was sampled so far."""

    prompt: list[int]
    max_new_tokens: int
    stop_ids: frozenset[int]
    choose: Callable[[Any, Any], tuple[int, float]]
    """Function from the ids so far and the logits to the next id and its log-probability."""
    finished: Callable[[Exception | None], object]
    """Function that ends the call, with an error if the model failed."""
    deadline: float | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str | None] = field(default_factory=list)
    """Version of the weights that sampled each id."""
    is_aborted: bool = False
    finish: FinishType | None = None

    def update_finish(self) -> bool:
        """Decide whether the request has ended."""
        if self.ids and self.ids[-1] in self.stop_ids:
            self.finish = FinishType.STOP
        elif len(self.ids) >= self.max_new_tokens:
            self.finish = FinishType.LENGTH
        elif self.is_aborted or (self.deadline is not None and time.monotonic() > self.deadline):
            self.finish = FinishType.ABORT
        return self.finish is not None


class TransformersEngine:
    """Token engine with a model of transformers in this process, on CPU, MPS or CUDA.

    The log-probabilities are those of the distribution that was sampled from. With temperature 0, the most probable id
    is chosen, with its log-probability at temperature 1.

    Args:
        model: Directory of the model. Nothing is downloaded.
        device: For example "cpu", "cuda" or "mps". By default the fastest available.
        dtype: Data type of the weights, for example "bfloat16". By default that of the model on a GPU, and float32 on a
            CPU, where it is exact and often faster.
        max_batch: Maximum number of requests that are decoded together.
        seed: Seed of the samples. By default they differ each time.

    Raises:
        ConfigError: If the model cannot be loaded.

    Example:
        async with TransformersEngine("models/Qwen2.5-0.5B-Instruct") as engine:
            generation = await engine.generate("t7/0", prompt_ids, {"max_new_tokens": 64})
    """

    logprobs_mode: LogprobsMode = "processed_logprobs"

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        device: str | None = None,
        dtype: str | None = None,
        max_batch: int = DEFAULT_MAX_BATCH,
        seed: int | None = None,
    ) -> None:
        check_model_path(fspath(model))
        try:
            import torch
            import transformers  # noqa: F401
        except ImportError as error:
            raise MissingExtra("torch", "local") from error
        if max_batch < 1:
            raise ConfigError(f"Invalid max_batch: {max_batch}. It must be at least 1.")
        self._torch: Any = torch
        self.device = device or _fastest_device(torch)
        self._dtype = dtype or ("float32" if self.device == "cpu" else "auto")
        self._model = self._load(model)
        self._vocab_size = int(self._model.config.get_text_config().vocab_size)
        self._max_batch = max_batch
        self._random = torch.Generator()
        if seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(seed)
        self._version: str | None = None
        self._weights = threading.Lock()
        """Held during a step of the model."""
        self._state = threading.Lock()
        self._waiting: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._requests: dict[str, _Request] = {}
        self._thread: threading.Thread | None = None

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        deadline: float | None = None,
        affinity: str | None = None,
    ) -> Generation:
        """Sample a completion of a prompt.

        Args:
            request_id: Id of this call, for `abort`.
            prompt_ids: Token ids of the prompt.
            sampling_params: `max_new_tokens`, and optionally `temperature`, `top_p`, `top_k`, `min_p`,
                `repetition_penalty`, `logit_bias`, `stop_token_ids` and `ignore_eos`.
            deadline: Time by which the call ends, on the clock of `time.monotonic()`. The tokens sampled until then are
                returned with `FinishType.ABORT`.
            affinity: Ignored: there is one model.

        Returns:
            The sampled tokens.

        Raises:
            EngineUnavailable: If the model fails, for example because memory is exhausted.
            EngineRefused: If the prompt or a parameter is invalid.
        """
        check_sampling_params(sampling_params)
        if unknown := sampling_params.keys() - PARAMETERS:
            raise EngineRefused(
                f"Unknown sampling parameters: {', '.join(sorted(unknown))}. Expected: {', '.join(sorted(PARAMETERS))}."
            )
        check_prompt_ids(prompt_ids, self._vocab_size)
        started, loop = time.monotonic(), asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def set_done(error: Exception | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        def finished(error: Exception | None) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop of the caller was closed
                loop.call_soon_threadsafe(set_done, error)

        request = _Request(
            prompt=list(prompt_ids),
            max_new_tokens=sampling_params["max_new_tokens"],
            stop_ids=self._stop_ids(sampling_params),
            choose=self._make_sampler(sampling_params),
            finished=finished,
            deadline=deadline,
        )
        self._requests[request_id] = request
        self._submit(request)
        try:
            await done
        finally:
            request.is_aborted = True  # ends it if the caller was cancelled
            self._requests.pop(request_id, None)
        return _generation(request, time.monotonic() - started)

    async def abort(self, request_id: str) -> None:
        """Stop a call, which then returns the ids sampled so far with `FinishType.ABORT`.

        Args:
            request_id: Id of the call. Unknown ids are ignored.
        """
        if request := self._requests.get(request_id):
            request.is_aborted = True

    async def update_weights(self, model_path: str | PathLike[str], version: str) -> None:
        """Replace the weights by those of another directory, between two tokens.

        Args:
            model_path: Directory of a model with the same architecture.
            version: Version of the weights. Ids that are sampled later have it as `weight_version`.

        Raises:
            ConfigError: If the weights cannot be loaded, or belong to another architecture.
        """

        def replace() -> None:
            state = self._load(model_path).state_dict()
            with self._weights:
                try:
                    self._model.load_state_dict(state)
                except RuntimeError as error:
                    raise ConfigError(f"{fspath(model_path)}: {str(error).splitlines()[0]}") from error
                self._version = version

        await asyncio.to_thread(replace)

    async def context_length(self) -> int | None:
        """Return the maximum number of ids of a prompt and its completion, or None if the model states none."""
        return getattr(self._model.config.get_text_config(), "max_position_embeddings", None)

    async def close(self) -> None:
        """Abort all calls. The engine can be used again."""
        for request in list(self._requests.values()):
            request.is_aborted = True

    async def __aenter__(self) -> TransformersEngine:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _load(self, path: str | PathLike[str]) -> Any:
        from transformers import AutoModelForCausalLM

        check_model_path(fspath(path))
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(fspath(path), dtype=self._dtype, local_files_only=True)
        except Exception as error:  # transformers raises many types
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"Cannot load the model {fspath(path)!r}: {reason:.200} Pass the model's directory, or download the "
                f"model first (hf download {fspath(path)})."
            ) from error
        model.train(False)
        return model.to(self.device)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        if params.get("ignore_eos"):
            return frozenset()
        eos = self._model.generation_config.eos_token_id
        known = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        return frozenset([*known, *(params.get("stop_token_ids") or ())])

    def _make_sampler(self, params: SamplingParams) -> Callable[[Any, Any], tuple[int, float]]:
        """Return the function that chooses the next id by the sampling parameters."""
        torch, random = self._torch, self._random
        temperature = float(params.get("temperature", 1.0))
        processors = _processors(params, self._vocab_size, self.device)

        def choose(ids: Any, logits: Any) -> tuple[int, float]:
            for process in processors:
                logits = process(ids, logits)
            logprobs = torch.log_softmax(logits[0].float(), -1).cpu()
            chosen = (
                int(logprobs.argmax()) if temperature == 0 else int(logprobs.exp().multinomial(1, generator=random))
            )
            return chosen, float(logprobs[chosen])

        return choose

    def _submit(self, request: _Request) -> None:
        with self._state:
            self._waiting.put(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="TransformersEngine", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        """Decode until no request has come for a while."""
        batches: list[_Batch] = []
        while True:
            new = self._take_waiting(block=not batches)
            if not new and not batches:
                with self._state:
                    if self._waiting.empty():
                        self._thread = None
                        return
            if new:
                try:
                    batches.append(_Batch(self._model, new))
                except Exception as error:  # torch raises many types
                    _fail(new, error)
            for batch in batches:
                self._step(batch)
            batches = [batch for batch in batches if batch.requests]

    def _take_waiting(self, *, block: bool) -> list[_Request]:
        taken: list[_Request] = []
        while len(taken) < self._max_batch:
            try:
                taken.append(self._waiting.get(block=block and not taken, timeout=IDLE_S))
            except queue.Empty:
                break
        return taken

    def _step(self, batch: _Batch) -> None:
        """Sample one id for each request of a batch, and finish those that have ended."""
        try:
            ended = [request for request in batch.requests if request.update_finish()]  # aborted or nothing to sample
            batch.remove(ended)
            if batch.requests:
                with self._weights:
                    batch.step(self._version)
            later = [request for request in batch.requests if request.update_finish()]
            batch.remove(later)
        except Exception as error:
            _fail(batch.requests, error)
            batch.requests = []
            return
        for request in (*ended, *later):
            request.finished(None)


class _Batch:
    """Requests that are decoded together, with the model's cache for them. Prompts are padded on the left."""

    def __init__(self, model: Any, requests: list[_Request]) -> None:
        import torch

        self._torch = torch
        self._model = model
        self.requests = requests
        longest = max(len(request.prompt) for request in requests)
        device = model.device
        pads = [longest - len(request.prompt) for request in requests]
        self._input = torch.tensor(
            [[0] * pad + one.prompt for pad, one in zip(pads, requests, strict=True)], device=device
        )
        self._mask = torch.tensor(
            [[0] * pad + [1] * len(one.prompt) for pad, one in zip(pads, requests, strict=True)], device=device
        )
        self._cache: Any = None

    def step(self, version: str | None) -> None:
        """Sample the next id of each request."""
        torch = self._torch
        positions = (self._mask.cumsum(-1) - 1).clamp(min=0)[:, -self._input.shape[1] :]
        with torch.inference_mode():
            output = self._model(
                input_ids=self._input,
                attention_mask=self._mask,
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        self._cache = output.past_key_values
        chosen = []
        for row, request in enumerate(self.requests):
            ids = torch.tensor([[*request.prompt, *request.ids]], device=self._input.device)
            token_id, logprob = request.choose(ids, output.logits[row : row + 1, -1])
            request.ids.append(token_id)
            request.logprobs.append(logprob)
            request.versions.append(version)
            chosen.append([token_id])
        self._input = torch.tensor(chosen, device=self._mask.device)
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)

    def remove(self, requests: Sequence[_Request]) -> None:
        """Remove requests, with their part of the cache."""
        if not requests:
            return
        kept = [row for row, request in enumerate(self.requests) if request not in requests]
        self.requests = [self.requests[row] for row in kept]
        if not kept:
            self._cache = None
            return
        indices = self._torch.tensor(kept, device=self._mask.device)
        self._input, self._mask = self._input[indices], self._mask[indices]
        if self._cache is not None:
            self._cache.batch_select_indices(indices)


def _fail(requests: Sequence[_Request], error: Exception) -> None:
    """End requests with an exception of the model."""
    logger.error("the model failed", exc_info=error)
    for request in requests:
        request.finished(EngineUnavailable(f"The model failed: {type(error).__name__}: {error}"))


def _generation(request: _Request, seconds: float) -> Generation:
    assert request.finish is not None
    changes = tuple(
        (index, str(version))
        for index, version in enumerate(request.versions)
        if index and version != request.versions[index - 1]
    )
    return Generation(
        ids=request.ids,
        logprobs=request.logprobs,
        finish=request.finish,
        weight_version=request.versions[0] if request.versions else None,
        weight_changes=changes,
        timings=GenerationTimings(total=seconds),
    )


def _processors(params: Mapping[str, Any], vocab_size: int, device: str) -> list[Callable[[Any, Any], Any]]:
    """Return the changes of the logits that the sampling parameters ask for, in the order of transformers."""
    import torch
    from transformers import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors: list[Callable[[Any, Any], Any]] = []
    if bias := params.get("logit_bias"):
        added = torch.zeros(vocab_size, device=device)
        for token_id, value in bias.items():
            if not 0 <= int(token_id) < vocab_size:
                raise EngineRefused(f"logit_bias: id {token_id} is outside the vocabulary of {vocab_size} ids.")
            added[int(token_id)] = value
        processors.append(lambda ids, logits: logits + added)
    temperature, top_k, top_p = (params.get(name) for name in ("temperature", "top_k", "top_p"))
    try:
        if (penalty := params.get("repetition_penalty") or 1.0) != 1.0:
            processors.append(RepetitionPenaltyLogitsProcessor(float(penalty)))
        if temperature not in (None, 0, 1):
            processors.append(TemperatureLogitsWarper(float(temperature)))
        if top_k is not None and top_k > 0:
            processors.append(TopKLogitsWarper(int(top_k)))
        if top_p is not None and top_p < 1:
            processors.append(TopPLogitsWarper(float(top_p)))
        if params.get("min_p"):
            processors.append(MinPLogitsWarper(float(params["min_p"])))
    except (TypeError, ValueError) as error:
        raise EngineRefused(f"Invalid sampling parameter: {error}") from error
    return processors


def _fastest_device(torch: Any) -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
