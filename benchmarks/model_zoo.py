"""Directories of current models, made of real vocabularies and chat templates.

    python benchmarks/model_zoo.py    # builds all of them, and prints their directories

A model whose vocabulary no package contains gets a stand-in: GPT-2's vocabulary with the model's special tokens. This
proves everything except the values of the ids. Two templates that no package contains are written here from their
published description (`OWN_TEMPLATES`).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FETCH = Path(__file__).parent.parent / ".ci/tokenizers"
FETCH_TIMEOUT_S = 900
STAND_IN = "gpt2"
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HERMES_TOKENS = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
QWEN_TOKENS = "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|>"
DEEPSEEK_TOKENS = (
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> "
    "<｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> "
    "<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> "
    "<｜tool▁output▁end｜> <｜tool▁sep｜>"
)
GLM_TOKENS = "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> /nothink"
GLM_MARKERS = f"{HERMES_TOKENS} <arg_key> </arg_key> <arg_value> </arg_value>"
MISTRAL_TOKENS = (
    "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] [CALL_ID] [ARGS] [IMG] [THINK] [/THINK]"
)
KIMI_TOKENS = (
    "<|im_end|> <|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|tool_calls_section_begin|> "
    "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|> [BOS] [EOS]"
)
GEMMA_4_TOKENS = (
    '<bos> <eos> <|turn> <turn|> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|> '
    "<|channel> <channel|> <|think|> <|image|> <|audio|> <|video|>"
)
LFM2_TOKENS = (
    "<|tool_list_start|> <|tool_list_end|> <|tool_call_start|> <|tool_call_end|> <|tool_response_start|> "
    "<|tool_response_end|>"
)
HARMONY_TOKENS = (
    "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> <|call|>"
)

OWN_TEMPLATES = {
    "olmo-3": """\
{%- set first = messages[0] -%}
<|im_start|>system
{% if first.role == 'system' %}{{ first.content }}{% else %}You are a helpful function-calling AI assistant.{% endif %}
{%- if tools %} You are provided with function signatures within <functions></functions> XML tags. \
<functions>{{ tools | tojson }}</functions>{% endif %}<|im_end|>
{% for message in messages -%}
{%- if message.role == 'user' -%}
<|im_start|>user
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' -%}
<|im_start|>assistant
{{ message.content or '' }}
{%- if message.tool_calls -%}
<function_calls>
{% for call in message.tool_calls -%}
{{ call.function.name }}(
{%- for key, value in call.function.arguments.items() -%}
{{ key }}={{ value | tojson }}{{ '' if loop.last else ', ' }}
{%- endfor -%}
)
{% endfor -%}
</function_calls>
{%- endif -%}
<|im_end|>
{% elif message.role in ('tool', 'environment') -%}
<|im_start|>environment
{{ message.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
""",
    "phi-4": """\
{%- for message in messages if message.role in ('system', 'user', 'assistant') -%}
<|im_start|>{{ message.role }}<|im_sep|>{{ message.content }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif -%}
""",
}


@dataclass(frozen=True)
class ZooModel:
    """A model, as the parts of its directory."""

    name: str
    """Official name of the directory."""
    model_type: str
    """As in the model's config.json."""
    template: str
    """Name of a fetched template, of an own one, or "" for the one in the vocabulary's package."""
    eos: str
    vocabulary: str = STAND_IN
    special: str = ""
    """Special tokens, separated by spaces. Empty: those of the vocabulary's package."""
    markers: str = ""
    """Added tokens that are not special."""
    bos: str | None = None

    @property
    def is_stand_in(self) -> bool:
        """True if the vocabulary is not the model's."""
        return self.vocabulary == STAND_IN


IM_END = "<|im_end|>"
MODELS = (
    ZooModel("Qwen2.5-7B-Instruct", "qwen2", "", IM_END, "qwen2_5"),
    ZooModel("Qwen3-8B", "qwen3", "", IM_END, "qwen3"),
    ZooModel("Qwen3-4B-Instruct-2507", "qwen3", "qwen3_instruct_2507", IM_END, "qwen3"),
    ZooModel("Qwen3-Coder-30B-A3B-Instruct", "qwen3_moe", "Qwen3-Coder", IM_END, "qwen3"),
    ZooModel("Qwen3-VL-4B-Instruct", "qwen3_vl", "qwen3_vl", IM_END, "qwen3"),
    ZooModel("Qwen3.5-4B", "qwen3_5", "qwen3_5_think", IM_END, "qwen3_6", QWEN_TOKENS, HERMES_TOKENS),
    ZooModel("Qwen3.6-27B", "qwen3_5", "qwen3_6", IM_END, "qwen3_6", QWEN_TOKENS, HERMES_TOKENS),
    ZooModel("QwQ-32B", "qwen2", "Qwen-QwQ-32B", IM_END, "qwen2_5"),
    ZooModel(
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "nemotron_h",
        "nemotron_3_nano",
        IM_END,
        STAND_IN,
        "<s> </s> <|im_start|> <|im_end|>",
        HERMES_TOKENS,
    ),
    ZooModel(
        "SmolLM3-3B",
        "smollm3",
        "HuggingFaceTB-SmolLM3-3B",
        IM_END,
        STAND_IN,
        "<|end_of_text|> <|im_start|> <|im_end|>",
        "<think> </think>",
    ),
    ZooModel(
        "Hermes-3-Llama-3.1-8B",
        "llama",
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
        IM_END,
        STAND_IN,
        "<|begin_of_text|> <|end_of_text|> <|im_start|> <|im_end|>",
        bos="<|begin_of_text|>",
    ),
    ZooModel("Llama-3.1-8B-Instruct", "llama", "meta-llama-Llama-3.1-8B-Instruct", "<|eot_id|>", "llama3_2"),
    ZooModel("Llama-3.2-3B-Instruct", "llama", "", "<|eot_id|>", "llama3_2"),
    ZooModel("Llama-3.3-70B-Instruct", "llama", "meta-llama-Llama-3.3-70B-Instruct", "<|eot_id|>", "llama3_2"),
    ZooModel("Mistral-Nemo-Instruct-2407", "mistral", "", "</s>", "mistral_nemo"),
    ZooModel(
        "Mistral-Small-3.2-24B-Instruct-2506",
        "mistral3",
        "Mistral-Small-3.2-24B-Instruct-2506",
        "</s>",
        STAND_IN,
        MISTRAL_TOKENS,
        bos="<s>",
    ),
    ZooModel(
        "Devstral-Small-2507",
        "mistral",
        "unsloth-mistral-Devstral-Small-2507",
        "</s>",
        STAND_IN,
        MISTRAL_TOKENS,
        bos="<s>",
    ),
    ZooModel("DeepSeek-V3", "deepseek_v3", "", "<｜end▁of▁sentence｜>", "deepseek_v3"),
    ZooModel("DeepSeek-V3-0324", "deepseek_v3", "deepseekv3", "<｜end▁of▁sentence｜>", "deepseek_v3"),
    ZooModel("DeepSeek-V3.1", "deepseek_v3", "deepseek-ai-DeepSeek-V3.1", "<｜end▁of▁sentence｜>", "deepseek_v3"),
    ZooModel("DeepSeek-V3.2", "deepseek_v32", "deepseek-ai-DeepSeek-V3.2", "<｜end▁of▁sentence｜>", "deepseek_v4"),
    ZooModel("DeepSeek-V4", "deepseek_v4", "deepseek-ai-DeepSeek-V4", "<｜end▁of▁sentence｜>", "deepseek_v4"),
    ZooModel(
        "DeepSeek-R1-Distill-Qwen-32B",
        "qwen2",
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        "<｜end▁of▁sentence｜>",
        STAND_IN,
        DEEPSEEK_TOKENS,
        "<think> </think>",
        bos="<｜begin▁of▁sentence｜>",
    ),
    ZooModel("GLM-4.5", "glm4_moe", "glm4moe", "<|endoftext|>", STAND_IN, GLM_TOKENS, GLM_MARKERS),
    ZooModel("GLM-4.6", "glm4_moe", "GLM-4.6", "<|endoftext|>", STAND_IN, GLM_TOKENS, GLM_MARKERS),
    ZooModel("GLM-4.7-Flash", "glm4_moe_lite", "GLM-4.7-Flash", "<|endoftext|>", STAND_IN, GLM_TOKENS, GLM_MARKERS),
    ZooModel("Kimi-K2-Instruct", "kimi_k2", "moonshotai-Kimi-K2", IM_END, STAND_IN, KIMI_TOKENS),
    ZooModel("Kimi-K2-Thinking", "kimi_k2", "Kimi-K2-Thinking", IM_END, STAND_IN, KIMI_TOKENS, "<think> </think>"),
    ZooModel(
        "MiniMax-M2",
        "minimax_m2",
        "MiniMax-M2",
        "[e~[",
        STAND_IN,
        "]~!b[ ]~b] [e~[",
        "<minimax:tool_call> </minimax:tool_call> <think> </think>",
    ),
    ZooModel(
        "gpt-oss-20b",
        "gpt_oss",
        "openai-gpt-oss-120b",
        "<|return|>",
        "o200k_base",
        HARMONY_TOKENS,
        bos="<|startoftext|>",
    ),
    ZooModel("gemma-4-31B-it", "gemma4", "gemma4_v5", "<turn|>", STAND_IN, GEMMA_4_TOKENS, bos="<bos>"),
    ZooModel("gemma-3-4b-it", "gemma3", "", "<end_of_turn>", "gemma3"),
    ZooModel(
        "Olmo-3-7B-Instruct", "olmo3", "olmo-3", "<|endoftext|>", STAND_IN, "<|endoftext|> <|im_start|> <|im_end|>"
    ),
    ZooModel("phi-4", "phi3", "phi-4", IM_END, "cl100k_base", "<|endoftext|> <|im_start|> <|im_sep|> <|im_end|>"),
    ZooModel(
        "Seed-OSS-36B-Instruct",
        "seed_oss",
        "ByteDance-Seed-OSS",
        "<seed:eos>",
        STAND_IN,
        "<seed:bos> <seed:eos>",
        "<seed:think> </seed:think> <seed:tool_call> </seed:tool_call>",
        bos="<seed:bos>",
    ),
    ZooModel(
        "granite-4.0-h-small",
        "granitemoehybrid",
        "ibm-granite-granite-4.0",
        "<|end_of_text|>",
        STAND_IN,
        "<|start_of_role|> <|end_of_role|> <|end_of_text|>",
        "<tool_call> </tool_call> <tool_response> </tool_response>",
    ),
    ZooModel(
        "LFM2.5-1.2B-Instruct",
        "lfm2",
        "lfm2_2_5_v2",
        IM_END,
        STAND_IN,
        f"<|startoftext|> <|endoftext|> <|im_start|> <|im_end|> {LFM2_TOKENS}",
        bos="<|startoftext|>",
    ),
)
"""Models of the field, by family."""


class ModelZoo:
    """The models, built when they are first asked for, in a cache."""

    def __init__(self) -> None:
        fetched = subprocess.run([FETCH], check=True, stdout=subprocess.PIPE, text=True, timeout=FETCH_TIMEOUT_S)
        self._parts = Path(fetched.stdout.strip().removeprefix("tokenizers="))
        key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
        self._target = self._parts / f"models-{key}"

    def directory(self, model: ZooModel) -> Path:
        """Return a model's directory."""
        directory = self._target / model.name
        if not directory.exists():
            half = self._target / f".{directory.name}.{os.getpid()}"
            shutil.rmtree(half, ignore_errors=True)
            half.mkdir(parents=True)
            self._build(model, half)
            with contextlib.suppress(OSError):  # another process was faster
                half.rename(directory)
            shutil.rmtree(half, ignore_errors=True)
        return directory

    def _build(self, model: ZooModel, directory: Path) -> None:
        tokenizer, config = self._vocabulary(model)
        if model.special:
            ids = {token: number for number, token in enumerate(tokenizer["model"]["vocab"])}
            names = [(token, True) for token in model.special.split()] + [(m, False) for m in model.markers.split()]
            tokenizer["added_tokens"] = [
                {
                    "id": len(ids) + index,
                    "content": token,
                    "special": is_special,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                }
                for index, (token, is_special) in enumerate(names)
            ]
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": model.eos}
        config |= {"bos_token": model.bos} if model.bos else {}
        template = config.pop("chat_template", None)
        if model.template:
            fetched = self._parts / "templates" / f"{model.template}.jinja"
            template = OWN_TEMPLATES.get(model.template) or fetched.read_text()
        _write_json(directory / "tokenizer.json", tokenizer)
        _write_json(directory / "tokenizer_config.json", config)
        _write_json(directory / "config.json", {"model_type": model.model_type})
        (directory / "chat_template.jinja").write_text(template)

    def _vocabulary(self, model: ZooModel) -> tuple[dict[str, Any], dict[str, Any]]:
        package = self._parts / "vocabularies" / model.vocabulary
        if package.is_dir():
            config = json.loads((package / "tokenizer_config.json").read_text())
            keep = {key: _content(value) for key, value in config.items() if key in KEPT_SETTINGS}
            return json.loads((package / "tokenizer.json").read_text()), keep
        if (ranks := package.with_suffix(".tiktoken")).exists():
            tokens = [base64.b64decode(line.split()[0]) for line in ranks.read_text().splitlines()]
            return _byte_level_bpe(tokens, QWEN_PATTERN), {}
        script = package.with_suffix(".cjs").read_text()
        encoding = json.loads(script[script.index("{") : script.rindex("}") + 1])
        return _byte_level_bpe(list(_read_ranks(encoding["bpe_ranks"])), encoding["pat_str"]), {}


KEPT_SETTINGS = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template", "add_bos_token", "image_token")


def _content(token: Any) -> Any:
    return token["content"] if isinstance(token, dict) else token


def _read_ranks(text: str) -> Iterator[bytes]:
    """Read tokens in the order of their ranks. Each line has a marker, a first rank, and tokens in base64."""
    for line in text.splitlines():
        yield from map(base64.b64decode, line.split()[2:])


def _byte_level_bpe(tokens: list[bytes], pattern: str) -> dict[str, Any]:
    """Return a tokenizer.json for the tokens of a tiktoken vocabulary, in the order of their ranks."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    letters = _byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    pairs = [_last_merge(token, ranks) for token in tokens if len(token) > 1]
    merges = [[*map(spell, pair)] for pair in pairs if all(part in ranks for part in pair)]
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {spell(token): rank for token, rank in ranks.items()},
            "merges": merges,
            "ignore_merges": True,
        },
    }


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the two parts that byte-pair encoding merges last into a token."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        costs = [ranks.get(parts[index] + parts[index + 1], len(ranks)) for index in range(len(parts) - 1)]
        best = costs.index(min(costs))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def _byte_letters() -> dict[int, str]:
    """Return the printable letters that stand for bytes in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False))


if __name__ == "__main__":
    zoo = ModelZoo()
    for zoo_model in MODELS:
        print(zoo.directory(zoo_model))
