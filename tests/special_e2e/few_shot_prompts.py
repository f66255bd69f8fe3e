"""Write few-shot prompts: each GSM8K question follows examples that use the code interpreter.

    python few_shot_prompts.py test.jsonl 64 > problems.jsonl

Fails if the file has fewer questions.
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
INSTRUCTION = "Calculate with the code_interpreter."


def few_shot_messages(question: str) -> list[dict[str, Any]]:
    """Return the messages of a question."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": INSTRUCTION}]
    for example, expression, value in EXAMPLES:
        call = {"name": "code_interpreter", "arguments": {"code": f"print({expression})"}}
        messages += [
            {"role": "user", "content": f"{example}\n{INSTRUCTION}"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": str(value)},
            {"role": "assistant", "content": f"#### {value}"},
        ]
    return [*messages, {"role": "user", "content": f"{question}\n{INSTRUCTION}"}]


def main() -> None:
    """Write the rows to stdout."""
    path, count = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    if len(rows) < int(count):
        sys.exit(f"{path} has only {len(rows)} questions, expected {count}.")
    for row in rows[: int(count)]:
        print(json.dumps({"messages": few_shot_messages(row["question"]), "answer": row["answer"]}))


if __name__ == "__main__":
    main()
