"""Reward function that lets a judge model, behind an OpenAI-compatible server, score the last answer."""

import os
import re

import aiohttp

from toolroll import InfraFault, Trajectory, charge

PROMPT = """\
Question: {question}
Reference: {reference}
Answer: {answer}

Compare the answer with the reference. Reply with one line: "Score: " and a number from 0 (wrong) to 10 (correct)."""
REJECTED_STATUSES = (429, 503)
"""HTTP statuses of requests that the server rejects before it runs the model, so that they cost nothing."""


async def score(
    trajectory: Trajectory, *, url: str, model: str, usd_per_million_tokens: float, timeout_s: float = 60
) -> float | None:
    """Return the judge's score of the last answer, between 0 and 1.

    The run config has the limits of this function. `charge` replaces the estimated cost of a call by the true one. An
    exception with the status 429 or 503, also as the cause of another one, lowers a limit that adapts.

    Args:
        trajectory: Trajectory whose `ground_truth` is the reference answer.
        url: URL of the server, without `/v1`.
        model: Name of the judge model.
        usd_per_million_tokens: Price of the prompt and the reply.
        timeout_s: Timeout of the request, in seconds.

    Returns:
        The score, or None if the judge does not reply with one.

    Raises:
        InfraFault: If the judge cannot be reached or rejects the request. The run attempts the sample again.
    """
    prompt = PROMPT.format(
        question=trajectory.messages[0].content,
        reference=trajectory.extra["ground_truth"],
        answer=trajectory.messages[-1].content,
    )
    try:
        reply, tokens = await _ask(url, model, prompt, timeout_s)
    except (aiohttp.ClientError, TimeoutError) as error:
        if isinstance(error, aiohttp.ClientResponseError) and error.status in REJECTED_STATUSES:
            charge(tokens=0, usd=0)
        raise InfraFault(f"The judge at {url} failed: {type(error).__name__}: {error}") from error
    charge(tokens=tokens, usd=tokens * usd_per_million_tokens / 1e6)
    found = re.search(r"Score: (\d+)", reply)
    return None if found is None else min(int(found[1]), 10) / 10


async def _ask(url: str, model: str, prompt: str, timeout_s: float) -> tuple[str, int]:
    """Return the reply of a model to a prompt, and the number of tokens of both."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 16}
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("OPENAI_API_KEY")) else {}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session,
        session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response,
    ):
        answer = await response.json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["total_tokens"]
