"""Find the program in a model's answer, which may be in a Markdown code fence.

A fence is a line of at least three backticks or tildes. It may be indented and may be followed by an info string, whose
first word is the tag (```` ```python ````). A backtick fence may also open after other text on its line if at most
one word follows it (`<answer>```python`).

A block ends at a line that starts with the same fence or a longer one, indented by at most three characters more than
the opening fence. If a word follows that fence, it opens another block and the previous block counts as unclosed; other
text after it is ignored (```` ```</answer> ```` closes a block). The indentation of the opening fence is removed from
the lines of the block.

All functions are pure, never raise, and take time linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

LANGUAGE_ALIASES = {
    "python": ("py", "python3", "py3"),
    "cpp": ("c++", "cc", "cxx", "c++17", "c++20"),
    "nodejs": ("js", "javascript", "node"),
    "typescript": ("ts",),
    "bash": ("sh", "shell", "zsh"),
    "go": ("golang",),
    "rust": ("rs",),
    "csharp": ("cs", "c#"),
    "kotlin_script": ("kotlin", "kt", "kts"),
    "ruby": ("rb",),
    "perl": ("pl",),
    "julia": ("jl",),
    "racket": ("rkt",),
    "sql": ("sqlite",),
    "php": (),
    "R": (),
}
"""Other names of the sandbox's languages."""

_LANGUAGE_BY_NAME = {
    name: language for language, aliases in LANGUAGE_ALIASES.items() for name in (language.lower(), *aliases)
}


def canonical_language(name: str) -> str:
    """Return the sandbox's name of a language, or the given name if it is unknown.

    >>> canonical_language("C++")
    'cpp'
    """
    return _LANGUAGE_BY_NAME.get(name.strip().lower(), name)


def strip_code_fence(code: str) -> str:
    r"""Remove a fence that encloses the whole text; return any other text unchanged.

    The closing fence may be missing.

    >>> strip_code_fence("```python\nprint(1)\n```")
    'print(1)'
    """
    blocks = list(_code_blocks(code.strip()))
    return blocks[0].code if len(blocks) == 1 and blocks[0].is_whole_text else code


def extract_program(answer: str, language: str) -> str:
    r"""Return the program in a model's answer.

    The program is the first of these that exists:

    1. the last closed block whose tag is the language or one of its aliases;
    2. the last closed block with any tag or none;
    3. the last unclosed block, of an answer that was truncated;
    4. the whole answer.

    Args:
        answer: Text of the answer.
        language: Language of the program, or an alias of it.

    Returns:
        The program, without fences.

    Example:
        >>> extract_program("Like this:\n```python\nprint(1)\n```\nThen run it:\n```sh\npython a.py\n```", "python")
        'print(1)'
    """
    blocks = list(_code_blocks(answer))
    if not blocks:
        return answer
    closed = [block for block in blocks if block.is_closed]
    wanted = canonical_language(language)
    tagged = [block for block in closed if canonical_language(block.tag) == wanted]
    return (tagged or closed or blocks)[-1].code


class _CodeFence(NamedTuple):
    """A run of backticks or tildes that may open or end a block."""

    marker: str
    """The backticks or tildes."""
    info: str
    """The text after the marker."""
    indent: int
    starts_line: bool
    """True if only white space precedes the marker on its line."""

    def opens_block(self) -> bool:
        if self.marker[0] == "`" and "`" in self.info:
            return False  # inline code
        return self.starts_line or (self.marker[0] == "`" and len(self.info.split()) < 2)

    def ends_block_of(self, opening: _CodeFence) -> bool:
        same_marker = self.marker[0] == opening.marker[0] and len(self.marker) >= len(opening.marker)
        return same_marker and self.starts_line and self.indent <= opening.indent + 3


class _CodeBlock(NamedTuple):
    tag: str
    code: str
    is_closed: bool
    is_whole_text: bool
    """True if no text precedes or follows the block."""


def _code_blocks(text: str) -> Iterator[_CodeBlock]:
    opening: _CodeFence | None = None
    block_lines: list[str] = []
    starts_text = True
    lines = text.split("\n")
    for number, line in enumerate(lines):
        fence = _find_fence(line)
        if opening is None:
            if fence is not None and fence.opens_block():
                opening, block_lines, starts_text = fence, [], number == 0 and fence.starts_line
        elif fence is None or not fence.ends_block_of(opening):
            block_lines.append(line)
        elif fence.info[:1].isalnum() and fence.opens_block():
            yield _make_block(opening, block_lines, is_closed=False, is_whole_text=False)
            opening, block_lines, starts_text = fence, [], False
        else:
            is_whole_text = starts_text and number == len(lines) - 1 and not fence.info
            yield _make_block(opening, block_lines, is_closed=True, is_whole_text=is_whole_text)
            opening = None
    if opening is not None:
        yield _make_block(opening, block_lines, is_closed=False, is_whole_text=starts_text)


def _make_block(opening: _CodeFence, lines: list[str], *, is_closed: bool, is_whole_text: bool) -> _CodeBlock:
    words = opening.info.split(None, 1)
    code = re.sub(rf"^[ \t]{{0,{opening.indent}}}", "", "\n".join(lines), flags=re.MULTILINE)
    return _CodeBlock(words[0].strip("{}.,:") if words else "", code, is_closed, is_whole_text)


def _find_fence(line: str) -> _CodeFence | None:
    """Return the first fence in a line. Tildes count only at its start."""
    content = line.lstrip(" \t")
    indent = len(line) - len(content)
    starts_line = content[:3] in ("```", "~~~")
    start = 0 if starts_line else content.find("```")
    if start < 0:
        return None
    info = content[start:].lstrip(content[start])
    marker = content[start : len(content) - len(info)]
    return _CodeFence(marker, info.strip(), indent if starts_line else 0, starts_line)
