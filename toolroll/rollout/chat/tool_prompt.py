"""Tool calling for models whose chat template does not show tools.

The conversation is rewritten so that any template shows it: the system message lists the tools and asks for calls in
the Hermes form, calls are text of the assistant, and tool responses are `<tool_response>` blocks in a user message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.rollout.chat.parsed_turn import Tools
from toolroll.schemas import JsonDict

# The wording that many models were trained with.
TOOLS_HEADER = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
TOOLS_FOOTER = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def with_tool_prompt(
    messages: Sequence[Mapping[str, Any]], tools: Tools, default_system: str | None, *, has_system_role: bool
) -> list[JsonDict]:
    """Rewrite a conversation.

    Args:
        messages: The conversation.
        tools: Tool schemas.
        default_system: System message of a conversation that has none.
        has_system_role: False if the template rejects system messages. The first user message then starts with it.

    Returns:
        The conversation, without calls, tool messages, or tools.
    """
    plain: list[JsonDict] = []
    for index, message in enumerate(messages):
        match message.get("role"):
            case "assistant":
                plain.append({"role": "assistant", "content": _with_calls(message)})
            case "tool":
                block = _join("<tool_response>\n", message.get("content") or "", "\n</tool_response>")
                if index and messages[index - 1].get("role") == "tool":
                    plain[-1]["content"] = _join(plain[-1]["content"], "\n", block)
                else:
                    plain.append({"role": "user", "content": block})
            case _:
                plain.append(dict(message))
    if not tools:
        return plain
    schemas = "".join(f"\n{json.dumps(dict(tool), ensure_ascii=False)}" for tool in tools)
    tool_list = f"{TOOLS_HEADER}{schemas}{TOOLS_FOOTER}"
    system = default_system
    if plain and plain[0].get("role") in ("system", "developer"):
        system = _text(plain.pop(0))
    system = f"{system}\n\n{tool_list}" if system else tool_list
    if has_system_role or not plain:
        return [{"role": "system", "content": system}, *plain]
    return [{**plain[0], "content": _join(f"{system}\n\n", plain[0].get("content") or "")}, *plain[1:]]


def _join(*contents: str | list[JsonDict]) -> str | list[JsonDict]:
    """Return the content of a message: text, or a list of parts if one of the contents has images."""
    parts: list[JsonDict] = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    if all("text" in part for part in parts):
        return "".join(str(part["text"]) for part in parts)
    return parts


def _with_calls(message: Mapping[str, Any]) -> str:
    parts = [_text(message)]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(function.get("name"), ensure_ascii=False)
        parts.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(filter(None, parts))


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(str(part.get("text", "")) for part in content)
