"""An engine with fixed answers and a fixed latency, for tests of whole runs."""

from typing import Any

from toolroll.rollout.engines.scripted import ScriptedEngine

CALL = '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>'


class FixedLatency(ScriptedEngine):
    """Calls the tool `turns` - 1 times, then answers. Each turn takes `delay` seconds."""

    def __init__(
        self, urls: Any, *, tokenizer: str, delay: float = 0.05, turns: int = 2, has_tool: bool = False
    ) -> None:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        stop = loaded.convert_tokens_to_ids("<|im_end|>")
        call = [*loaded.encode(CALL, add_special_tokens=False), stop]
        end = [*loaded.encode("That is all.", add_special_tokens=False), stop]
        super().__init__([*[call] * (turns - 1 if has_tool else 0), end], delay=delay)
