"""Tool calls as toolroll and SGLang parse them."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rollout.test_model_zoo import MODEL_BY_FORM, load, parse, renderer_of
from toolroll.rollout.chat.template import PROBE_CALLS, PROBE_TOOLS, common_length, turn_of

pytestmark = pytest.mark.sglang
ROOT = Path(__file__).parent.parent.parent

SGLANG_PARSERS = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "glm": "glm47",
    "mistral": "mistral",
    "dsml": "deepseekv4",
    "kimi_k2": "kimi_k2",
    "minimax_m2": "minimax-m2",
    "gemma4": "gemma4",
    "llama": "llama3",
    "harmony": "gpt-oss",
    "lfm2": "lfm2",
}
"""SGLang's parser for each form. It has none for the others."""
AS_SAMPLED: dict[str, tuple[str, str]] = {
    "mistral": (r"\[CALL_ID\]\w+", ""),
    "llama": (r"^.*?<\|end_header_id\|>\s*", ""),
    "harmony": (
        r"<\|start\|>assistant to=(\S+?)<\|channel\|>commentary json(.*)",
        r"<|start|>assistant<|channel|>commentary to=\1 <|constrain|>json\2<|call|>",
    ),
}
"""Replacements that turn the history of a template into the text that the model samples, which SGLang expects."""
KNOWN_DIFFERENCES = {("gemma4", "nested"): "SGLang reads null in an argument as text"}
USER = {"role": "user", "content": "Hi"}


def parse_with_sglang(texts: list[tuple[str, str]]) -> list[list[list[Any]]]:
    """Return the calls that SGLang finds in each text. Its server knows only the parsers that fit its model."""
    made = subprocess.run([ROOT / ".ci/sglang"], stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
    python = made.stdout.split()[0].removeprefix("python=")
    request = json.dumps({"tools": PROBE_TOOLS, "texts": texts})
    command = [python, ROOT / "tests/rollout/sglang_side/parse_calls.py"]
    done = subprocess.run(command, input=request, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    results: list[list[list[Any]]] = json.loads(done.stdout.splitlines()[-1])
    return results


def sampled_text(form: str, calls: list[tuple[str, dict[str, Any]]]) -> str | None:
    """Return a turn with calls as the model samples it, or None if the template rejects it."""
    rendering = load(form)
    renderer = renderer_of(rendering)
    before = renderer.text([USER], PROBE_TOOLS)
    try:
        text = renderer.text([USER, turn_of(calls)], PROBE_TOOLS)
    except Exception:  # the template allows one call per turn
        return None
    text = text[common_length(before, text) :]
    for token_id in rendering.stop_ids:
        text = text.removesuffix("\n").removesuffix(rendering.decode([token_id]))
    return re.sub(*AS_SAMPLED.get(form, ("(?!)", "")), text, flags=re.DOTALL)


def test_sglang_has_a_parser_for_most_forms() -> None:
    assert MODEL_BY_FORM.keys() - SGLANG_PARSERS.keys() == {"seed_oss", "olmo3"}


def test_calls_are_parsed_as_by_sglang() -> None:
    texts = {
        (form, kind): text
        for form in SGLANG_PARSERS
        for kind, calls in PROBE_CALLS.items()
        if (text := sampled_text(form, calls)) is not None
    }
    parsed = parse_with_sglang([(SGLANG_PARSERS[form], text) for (form, _), text in texts.items()])
    compared = set()
    for ((form, kind), text), theirs in zip(texts.items(), parsed, strict=True):
        ours = [[tool, arguments] for tool, arguments, problem in parse(load(form), text, PROBE_TOOLS) if not problem]
        if ours and theirs and (form, kind) not in KNOWN_DIFFERENCES:
            assert ours == theirs, text
            compared.add((form, kind))
    assert {(form, "single") for form in SGLANG_PARSERS} <= compared
    assert len(compared) >= len(texts) - len(KNOWN_DIFFERENCES) - 1
