"""Code in Markdown fences: the program in a model's answer.

A fence is a line of at least three backticks or tildes, which may be indented, and may be followed by an info string
whose first word is the tag (```` ```python ````). A backtick fence may also open behind other text, if nothing but a
tag follows (`<answer>```python`). A block ends at a line that begins with the same fence, or a longer one, indented by
at most three more than the opening, and goes on with no word (```` ```</answer> ```` ends one). If it goes on with a
word, another block begins there, and the one before was never closed. What the fence is indented by is taken off the
block's lines.

`last_block` takes, of all blocks in an answer:

1. the last closed one whose tag is the language, or a usual other name of it (`py` for python, `c++` for cpp);
2. else the last closed one, whatever its tag;
3. else the last one, which was never closed: the answer was cut short;
4. where there is no fence at all, the whole text.

Pure, never raises, and takes time in proportion to the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

OTHER_NAMES = {
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
"""A language of the sandbox → how else it is called."""
_LANGUAGE_OF = {name.lower(): language for language, names in OTHER_NAMES.items() for name in (language, *names)}


def language_of(name: str) -> str:
    """The sandbox's name of a language: `language_of("c++")` is "cpp". One that isn't known is returned as it is."""
    return _LANGUAGE_OF.get(name.strip().lower(), name)


def unfence(code: str) -> str:
    """The code without a fence around all of it; anything else is returned as it is. It may lack the closing fence."""
    found = list(_blocks(code.strip()))
    if len(found) != 1 or not found[0].is_all:
        return code
    return found[0].code


def last_block(text: str, language: str) -> str:
    """The program in an answer, by the rule above."""
    found = list(_blocks(text))
    if not found:
        return text
    closed = [block for block in found if block.closed]
    wanted = language_of(language)
    tagged = [block for block in closed if language_of(block.tag) == wanted]
    return (tagged or closed or found)[-1].code


@dataclass(frozen=True)
class _Fence:
    """What opens a block, or may close one."""

    mark: str
    """The backticks or tildes."""
    info: str
    indent: int
    first: bool
    """Whether nothing stands before it in its line."""

    def opens(self) -> bool:
        if self.mark[0] == "`" and "`" in self.info:
            return False  # code within a line
        return self.first or (self.mark[0] == "`" and len(self.info.split()) < 2)

    def may_end(self, opening: _Fence) -> bool:
        """Whether a block ends here that began there, by being closed or by another's beginning."""
        same = self.mark[0] == opening.mark[0] and len(self.mark) >= len(opening.mark)
        return same and self.first and self.indent <= opening.indent + 3

    def goes_on_with_word(self) -> bool:
        return self.info[:1].isalnum() and self.opens()


@dataclass(frozen=True)
class _Block:
    tag: str
    code: str
    closed: bool
    is_all: bool
    """Whether nothing stands before or behind it."""


def _blocks(text: str) -> Iterator[_Block]:
    """Every block of a text, in order. Only the last one may be open still, or one that another's fence cut off."""
    opening: _Fence | None = None
    lines: list[str] = []
    every = text.split("\n")
    alone = True
    for number, line in enumerate(every):
        fence = _fence_of(line)
        if opening is None:
            if fence is not None and fence.opens():
                opening, lines, alone = fence, [], number == 0 and fence.first
        elif fence is None or not fence.may_end(opening):
            lines.append(line)
        elif fence.goes_on_with_word():
            yield _block(opening, lines, closed=False, is_all=False)
            opening, lines, alone = fence, [], False
        else:
            is_all = alone and number == len(every) - 1 and not fence.info
            yield _block(opening, lines, closed=True, is_all=is_all)
            opening = None
    if opening is not None:
        yield _block(opening, lines, closed=False, is_all=alone)


def _block(opening: _Fence, lines: list[str], *, closed: bool, is_all: bool) -> _Block:
    if opening.indent:
        lines = [_less_indented(line, opening.indent) for line in lines]
    words = opening.info.split(None, 1)
    return _Block(words[0].strip("{}.,:") if words else "", "\n".join(lines), closed, is_all)


def _less_indented(line: str, most: int) -> str:
    return line[min(most, len(line) - len(line.lstrip(" \t"))) :]


def _fence_of(line: str) -> _Fence | None:
    """The first run of three or more in a line. Tildes count at its beginning only."""
    content = line.lstrip(" \t")
    indent = len(line) - len(content)
    first = content[:3] in ("```", "~~~")
    start = 0 if first else content.find("```")
    if start < 0:
        return None
    rest = content[start:].lstrip(content[start])
    mark = content[start : len(content) - len(rest)]
    return _Fence(mark, rest.strip(), indent if first else 0, first)
