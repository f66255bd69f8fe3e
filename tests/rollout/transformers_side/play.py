"""Runs TransformersEngine with a real model, and writes what was observed: python play.py MODEL RESULT"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from toolroll import Rollout, tool
from toolroll.errors import EngineRefused
from toolroll.rollout.engines.transformers_engine import TransformersEngine

MODEL, RESULT = map(Path, sys.argv[1:])
EXAMPLES = [
    message
    for a, b in ((12, 30), (3, 4), (25, 8), (60, 17))
    for message in (
        {"role": "user", "content": f"What is {a}+{b}?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "add", "arguments": {"a": a, "b": b}}}],
        },
        {"role": "tool", "content": str(a + b)},
        {"role": "assistant", "content": str(a + b)},
    )
]
"""Without examples, a model this small calls no tools."""


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def forward_logprobs(engine: TransformersEngine, ids: list[int]) -> list[float]:
    """Return the log-probability of each id after the first, in one pass."""
    with torch.inference_mode():
        logits = engine._model(input_ids=torch.tensor([ids])).logits[0, :-1]
    chosen = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(ids[1:])[:, None])
    result: list[float] = chosen[:, 0].tolist()
    return result


async def rollouts(engine: TransformersEngine) -> dict[str, Any]:
    """Run trajectories with a tool, and compare their log-probabilities with a forward pass."""
    prompts = [[*EXAMPLES, {"role": "user", "content": f"What is {number}+{number + 5}?"}] for number in (7, 21, 40)]
    limits = {"max_assistant_turns": 3, "max_response_len": 300}
    params = {"max_new_tokens": 48, "temperature": 1.0}
    rollout = Rollout(engine=engine, tokenizer=str(MODEL), tools=[add], limits=limits, sampling_params=params)
    trajectories = [trajectory async for trajectory in rollout.run(prompts, n=3)]
    differences = []
    for trajectory in trajectories:
        expected = forward_logprobs(engine, trajectory.tokens.ids.tolist())
        sampled = [index for index, mask in enumerate(trajectory.tokens.mask) if mask]
        differences += [abs(trajectory.tokens.logprobs[index] - expected[index - 1]) for index in sampled]
    return {
        "outcomes": [trajectory.outcome for trajectory in trajectories],
        "fidelity": [str(trajectory.fidelity) for trajectory in trajectories],
        "calls": sum(len(trajectory.calls) for trajectory in trajectories),
        "max_difference": max(differences),
    }


async def batches(engine: TransformersEngine) -> dict[str, Any]:
    """Decode prompts of different lengths alone and together: the most probable ids are the same."""
    texts = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time there was a small", "Hi"]
    encode = Rollout(engine=engine, tokenizer=str(MODEL)).rendering.encode  # type: ignore[union-attr]
    prompts = [encode(text) for text in texts]
    params = [{"max_new_tokens": 4 + 3 * index, "temperature": 0} for index in range(len(prompts))]
    alone = [(await engine.generate("a", one, param)).ids for one, param in zip(prompts, params, strict=True)]
    calls = [engine.generate(f"t{i}", one, params[i]) for i, one in enumerate(prompts)]
    together = [generation.ids for generation in await asyncio.gather(*calls)]
    sampled = await engine.generate("k", prompts[0], {"max_new_tokens": 4, "top_k": 1})
    banned = await engine.generate("b", prompts[0], {**params[0], "logit_bias": {str(alone[0][0]): -100.0}})
    stopped = await engine.generate("s", prompts[0], {**params[0], "stop_token_ids": [alone[0][1]]})
    return {
        "alone": alone,
        "together": together,
        "top_k_1": sampled.ids,
        "banned": banned.ids,
        "stopped": [stopped.ids, stopped.finish],
    }


async def aborts(engine: TransformersEngine) -> dict[str, Any]:
    """Abort a call, cancel a call, and end one at its deadline."""
    params = {"max_new_tokens": 2000, "ignore_eos": True}
    call = asyncio.create_task(engine.generate("long", [1, 2, 3], params))
    await asyncio.sleep(1.0)
    await engine.abort("long")
    aborted = await asyncio.wait_for(call, 30)
    cancelled = asyncio.create_task(engine.generate("cancelled", [1, 2, 3], params))
    await asyncio.sleep(0.2)
    cancelled.cancel()
    late = await engine.generate("late", [1, 2, 3], params, deadline=time.monotonic() + 1.0)
    try:
        await engine.generate("r", [1], {"max_new_tokens": 1, "temperatur": 1.0})
        refused = ""
    except EngineRefused as error:
        refused = str(error)
    left = [request for request in engine._requests.values() if not request.is_aborted]
    finishes = [aborted.finish, late.finish]
    return {"ids": [len(aborted.ids), len(late.ids)], "finishes": finishes, "left": len(left), "refused": refused}


async def weights(engine: TransformersEngine) -> dict[str, Any]:
    """Replace the weights during a call."""
    other = RESULT.parent / "other"
    changed = TransformersEngine(MODEL)._model
    with torch.no_grad():
        changed.model.norm.weight.mul_(0.5)
    changed.save_pretrained(other)
    call = asyncio.create_task(engine.generate("w", [1, 2, 3], {"max_new_tokens": 2000, "ignore_eos": True}))
    await asyncio.sleep(0.5)
    await engine.update_weights(other, "step-1")
    await asyncio.sleep(0.5)
    await engine.abort("w")
    generation = await call
    after = await engine.generate("a", [1, 2, 3], {"max_new_tokens": 1, "temperature": 1.0})
    expected = forward_logprobs(engine, [1, 2, 3, *after.ids])[-1]
    same = torch.equal(engine._model.model.norm.weight, changed.model.norm.weight)
    return {
        "first": generation.weight_version,
        "changes": [version for _, version in generation.weight_changes],
        "after": after.weight_version,
        "difference": abs((after.logprobs or [0.0])[0] - expected),
        "same": same,
    }


async def leave(engine: TransformersEngine) -> None:
    """End the event loop during a call."""
    task = asyncio.create_task(engine.generate("left", [1, 2, 3], {"max_new_tokens": 2000, "ignore_eos": True}))
    await asyncio.sleep(0.5)
    assert not task.done()


async def main() -> dict[str, Any]:
    async with TransformersEngine(MODEL, seed=0) as engine:
        await asyncio.to_thread(asyncio.run, leave(engine))
        seen = {"rollouts": await rollouts(engine), "batches": await batches(engine)}
        return seen | {"aborts": await aborts(engine), "weights": await weights(engine)}


if __name__ == "__main__":
    RESULT.write_text(json.dumps(asyncio.run(main())))
