"""An engine that calls MCP tools by a script, and answers with their results. For tests of whole runs."""

from collections.abc import Callable
from typing import Any

from toolroll.rollout.engines.base import ChatReply, FinishType, GenerationTimings
from toolroll.schemas import FunctionCall, Message, ToolCall

Call = tuple[str, dict[str, Any]]
Script = tuple[list[list[Call]], Callable[[list[str]], str]]
"""The calls of each turn, and a function that returns the answer for the results of the last turn."""


def write(path: str, content: str) -> Call:
    return "write_file", {"path": path, "content": content}


def read(path: str) -> Call:
    return "read_text_file", {"path": path}


SCRIPTS: dict[str, Script] = {
    "numbers.txt": (
        [[write("numbers.txt", "1\n2\n3\n4\n5")], [read("numbers.txt")]],
        lambda results: results[0].splitlines()[-1],
    ),
    "a.txt": (
        [[write("a.txt", "red"), write("b.txt", "blue")], [("list_directory", {"path": "."})]],
        lambda results: str(results[0].count("[FILE]")),
    ),
    "greeting.txt": (
        [
            [write("greeting.txt", "hello world")],
            [("edit_file", {"path": "greeting.txt", "edits": [{"oldText": "world", "newText": "there"}]})],
            [read("greeting.txt")],
        ],
        lambda results: results[0],
    ),
    "one.py": (
        [
            [write("one.py", "x = 1"), write("two.py", "y = 2")],
            [("search_files", {"path": ".", "pattern": "*.py"})],
            [read("one.py"), read("two.py")],
        ],
        lambda results: ["one.py", "two.py"][["y" in text for text in results].index(True)],
    ),
    "hello": ([[("echo", {"text": "hello"})]], lambda results: results[0]),
}
"""Scripts by a text in the prompt."""


class McpEngine:
    """The engine.

    Args:
        urls: Not used.
    """

    def __init__(self, urls: Any) -> None:
        pass

    async def chat(self, request_id: str, messages: list[Message], *_: Any, **__: Any) -> ChatReply:
        """Return the next calls of the script, or the answer."""
        prompt = next(str(message.content) for message in messages if message.role == "user")
        turns, answer = next(script for text, script in SCRIPTS.items() if text in prompt)
        number = sum(message.role == "assistant" for message in messages)
        if number < len(turns):
            calls = [
                ToolCall(id=f"{number}-{place}", function=FunctionCall(name=name, arguments=arguments))
                for place, (name, arguments) in enumerate(turns[number])
            ]
            reply = Message(role="assistant", content="", tool_calls=calls)
        else:
            results = [str(message.content) for message in messages[-len(turns[-1]) :]]
            reply = Message(role="assistant", content=answer(results))
        return ChatReply(message=reply, finish=FinishType.STOP, timings=GenerationTimings(total=0.0))

    async def close(self) -> None:
        """Do nothing."""
