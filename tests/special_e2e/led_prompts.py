"""GSM8K's questions, each after some that were answered with the code interpreter: a small model is led by examples.

    python led_prompts.py test.jsonl 64 > problems.jsonl

Ends with an error where there are fewer.
"""

import json
import sys
from typing import Any

EXAMPLES = [
    ("A farmer has 12 hens and buys 30 more. How many hens does he have?", "12 + 30", 42),
    ("Mia had 81 stickers and gave away 19. How many are left?", "81 - 19", 62),
    ("A box holds 8 cakes. How many cakes are in 7 boxes?", "7 * 8", 56),
    ("Each of 4 friends has 15 marbles, and Ana has 5. How many marbles are there?", "4 * 15 + 5", 65),
]
HOW = "Calculate with the code_interpreter."


def led(question: str) -> list[dict[str, Any]]:
    """The messages of a question."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": HOW}]
    for asked, expression, value in EXAMPLES:
        call = {"name": "code_interpreter", "arguments": {"code": f"print({expression})"}}
        messages += [
            {"role": "user", "content": f"{asked}\n{HOW}"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": str(value)},
            {"role": "assistant", "content": f"#### {value}"},
        ]
    return [*messages, {"role": "user", "content": f"{question}\n{HOW}"}]


def main() -> None:
    """Write the rows."""
    path, count = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    if len(rows) < int(count):
        sys.exit(f"{path} has {len(rows)} questions, not {count}")
    for row in rows[: int(count)]:
        print(json.dumps({"messages": led(row["question"]), "answer": row["answer"]}))


if __name__ == "__main__":
    main()
