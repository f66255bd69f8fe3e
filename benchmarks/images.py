"""Images reach the model token by token, in prompts and in tool responses.

    python benchmarks/images.py [--engine sglang|vllm] [--json]

A small vision model with random weights (`vision_model.py`) runs on real engines. Each trajectory has an image in its
prompt and in every tool response. The model calls no tools, so each of its turns is taken for a call. Compared are:

- the prompts with those that the engine used (vLLM returns their ids, SGLang their length);
- the log-probabilities of the sampled tokens with those that transformers computes from the trajectory, in one pass;
- the same with the last image painted white, which must differ: otherwise the model did not see it.

The first token of a turn follows directly from the prompt and is compared separately. The later ones also depend on how
an engine decodes, and those of SGLang on a CPU differ more. Whether they do so without images is not measured, and its
`max_difference` has no bound.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import PIL.Image
from model_zoo import MODELS, ModelZoo
from real_engine import RealEngine, environment, real_engine, real_vllm
from report import report

from toolroll import BaseTool, Rollout, SGLangEngine, ToolResponse, ToolResult, Trajectory, VLLMEngine
from toolroll.rollout.chat.formats import load_rendering
from toolroll.rollout.chat.parsed_turn import ParsedCall, ParsedTurn
from toolroll.rollout.chat.rendering import Rendering
from toolroll.rollout.engines.base import FinishType, Generation
from toolroll.rollout.tokens import Author
from toolroll.schemas import JsonDict

TRAJECTORIES, TURNS, TOKENS_PER_TURN = 3, 6, 32
VISION_MODEL = Path(__file__).with_name("vision_model.py")
ENGINES: dict[str, tuple[type[Any], Callable[[Path, str], AbstractContextManager[RealEngine]]]] = {
    "sglang": (SGLangEngine, real_engine),
    "vllm": (VLLMEngine, real_vllm),
}
BOUNDS: dict[str, Callable[[float], bool]] = {
    "prompts_identical": lambda value: value == TRAJECTORIES * TURNS,
    "first_difference": lambda value: value <= 1e-4,
    "vllm_max_difference": lambda value: value <= 1e-4,
    "min_difference_blank": lambda value: value >= 0.1,
}
"""Bounds by the end of a figure's name."""


def picture(seed: int) -> PIL.Image.Image:
    """Return noise of a random size."""
    random = np.random.default_rng(seed)
    width, height = random.integers(40, 240, 2)
    return PIL.Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


class Camera(BaseTool[list[int]]):
    """Returns another picture for each call."""

    default_schema: ClassVar[JsonDict] = {
        "type": "function",
        "function": {"name": "camera", "description": "Take a picture."},
    }
    returns_images = True

    def new_state(self, seed: int) -> list[int]:
        """Return the seed of the first picture."""
        return [seed]

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        """Return a picture."""
        seed = self.state(instance_id)
        seed[0] += 1
        return ToolResult(ToolResponse(image=[picture(seed[0])], text=f"Picture {seed[0]}"), None, {})


def make_engine(kind: type[Any], url: str) -> Any:
    """Return an engine whose turns end after `TOKENS_PER_TURN` as if the model had stopped, with the prompts' count."""

    class Stopping(kind):  # type: ignore[misc]
        prompts = 0

        async def generate(self, *args: Any, **options: Any) -> Generation:
            generation: Generation = await super().generate(*args, **options)
            self.prompts += 1
            return replace(generation, finish=FinishType.STOP)

    return Stopping(url)


def make_rendering(model_dir: Path) -> Rendering:
    """Return a rendering that takes every turn for a call of the camera."""
    rendering = load_rendering(str(model_dir))

    def parse(ids: Sequence[int], **options: Any) -> ParsedTurn:
        return ParsedTurn("", calls=(ParsedCall("camera", {}, ""),))

    rendering.parse = parse  # type: ignore[method-assign]
    return rendering


async def run_trajectories(engine: Any, model_dir: Path) -> list[Trajectory]:
    """Run the trajectories."""
    limits = {"max_assistant_turns": TURNS, "max_response_len": 3000}
    prompts = [
        {
            "prompt": [
                {"role": "user", "content": [{"type": "image", "image": picture(seed)}, {"text": "What is it?"}]}
            ],
            "tools_kwargs": {"camera": {"create_kwargs": {"seed": 1000 * seed}}},
        }
        for seed in range(1, TRAJECTORIES + 1)
    ]
    async with Rollout(
        engine=engine,
        rendering=make_rendering(model_dir),
        tools=[Camera()],
        limits=limits,
        sampling_params={"max_new_tokens": TOKENS_PER_TURN, "temperature": 1.0},
    ) as rollout:
        return [trajectory async for trajectory in rollout.run(prompts)]


def score(python: str, model_dir: Path, trajectories: list[Trajectory]) -> list[dict[str, list[float]]]:
    """Return the log-probabilities that transformers computes."""
    sequences = [
        {
            "ids": trajectory.tokens.ids.tolist(),
            "images": [base64.b64encode(span.image.data).decode() for span in trajectory.tokens.images],
        }
        for trajectory in trajectories
    ]
    command = [python, str(VISION_MODEL), "score", str(model_dir)]
    done = subprocess.run(command, input=json.dumps(sequences), stdout=subprocess.PIPE, text=True, check=True)
    scores: list[dict[str, list[float]]] = json.loads(done.stdout)
    return scores


def compare(trajectories: list[Trajectory], scores: list[dict[str, list[float]]]) -> dict[str, float]:
    """Return the largest differences from transformers, and the smallest effect of a white image on a trajectory."""
    differences, first_differences, effects = [], [], []
    for trajectory, scored in zip(trajectories, scores, strict=True):
        tokens = trajectory.tokens
        sampled = [index for index, mask in enumerate(tokens.mask) if mask]
        first = [span.start for span in tokens.spans if span.author is Author.MODEL]
        after_last = [index for index in sampled if index >= tokens.images[-1].end]
        differences += [abs(tokens.logprobs[index] - scored["seen"][index - 1]) for index in sampled]
        first_differences += [abs(tokens.logprobs[index] - scored["seen"][index - 1]) for index in first]
        effects.append(max(abs(scored["seen"][index - 1] - scored["blank"][index - 1]) for index in after_last))
    return {
        "first_difference": max(first_differences),
        "max_difference": max(differences),
        "min_difference_blank": min(effects),
    }


def measure(name: str, model_dir: Path, python: str) -> dict[str, Any]:
    """Run the trajectories on one engine and return the figures."""
    kind, serve = ENGINES[name]
    with serve(model_dir, "float32") as server:
        engine = make_engine(kind, server.url)
        trajectories = asyncio.run(run_trajectories(engine, model_dir))
    if failed := [trajectory.error for trajectory in trajectories if trajectory.outcome != "ok"]:
        raise RuntimeError(f"{name}: {failed[0]}")
    images = sum(len(trajectory.tokens.images) for trajectory in trajectories)
    counts = {"prompts": TRAJECTORIES * TURNS, "prompts_identical": engine.prompts, "images": images}
    return counts | compare(trajectories, score(python, model_dir, trajectories))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, help="default: both")
    parser.add_argument("--quick", action="store_true", help="no effect: the benchmark has one size")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        model_dir = Path(directory) / "model"
        python = environment("sglang")["python"]
        [model] = [model for model in MODELS if model.name == "Qwen3-VL-4B-Instruct"]
        tokenizer_dir = ModelZoo().directory(model)
        subprocess.run([python, str(VISION_MODEL), "make", str(tokenizer_dir), str(model_dir)], check=True)
        names = [options.engine] if options.engine else list(ENGINES)
        with ThreadPoolExecutor() as pool:  # each engine uses one core, and takes minutes
            measurements = {name: pool.submit(measure, name, model_dir, python) for name in names}
        for name, measured in measurements.items():
            figures |= {f"{name}_{key}": value for key, value in measured.result().items()}
    bounds = {key: is_within for key in figures for end, is_within in BOUNDS.items() if key.endswith(end)}
    report(figures, bounds, as_json=options.json)


if __name__ == "__main__":
    main()
