"""Make text encodable, and shorten it or hide credentials for messages."""

from __future__ import annotations

import json
import re
from typing import Any

_CREDENTIALS = re.compile(r"//[^/\s]*@")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_LONE_SURROGATE = re.compile(r"[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]")


def replace_lone_surrogates(text: str) -> str:
    r"""Replace each lone surrogate by U+FFFD and join surrogates that form a pair, so that UTF-8 can encode the text.

    Models write lone surrogates as JSON escapes.

    >>> replace_lone_surrogates("a\ud800b")
    'a\ufffdb'
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        # Several times as fast as the codec's "replace", which matters for millions of them in a hostile request.
        text = _LONE_SURROGATE.sub("\ufffd", text)
        return text.encode("utf-16", "surrogatepass").decode("utf-16") if _SURROGATE.search(text) else text
    return text


def replace_lone_surrogates_in_json(value: Any) -> Any:
    """Apply `replace_lone_surrogates` to every string in a JSON value, including the keys of objects.

    Args:
        value: Any JSON value. Objects that are not strings, lists or dicts are returned unchanged.

    Returns:
        The value with its lists and dicts copied.

    Raises:
        RecursionError: If the value is nested too deeply.
    """
    match value:
        case str():
            return replace_lone_surrogates(value)
        case list():
            return [replace_lone_surrogates_in_json(item) for item in value]
        case dict():
            clean = replace_lone_surrogates_in_json
            return {clean(key): clean(item) for key, item in value.items()}
    return value


def json_error_text(error: json.JSONDecodeError) -> str:
    """Return the message of a JSON error for a sentence that goes on with "at".

    >>> try:
    ...     json.loads('{"a": "b')
    ... except json.JSONDecodeError as error:
    ...     json_error_text(error)
    'unterminated string starting'
    """
    return error.msg.lower().removesuffix(" at")


def hide_credentials(text: str, shown: str = "***@") -> str:
    """Replace the user name and password of every URL in a text by `shown`.

    >>> hide_credentials("http://user:secret@host:8080/run")
    'http://***@host:8080/run'
    """
    return _CREDENTIALS.sub(f"//{shown}", text)


def shorten(text: str, max_chars: int) -> str:
    """Return at most `max_chars` characters of a text, replacing its end by "…" if necessary.

    >>> shorten("connection refused", 11)
    'connection…'
    """
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def shorten_middle(text: str, max_chars: int, *, head_chars: int | None = None) -> str:
    """Return at most `max_chars` characters of a text, replacing its middle by "…" if necessary.

    Suits error messages, whose cause is often at the end.

    Args:
        text: Text to shorten.
        max_chars: Maximum length of the result.
        head_chars: Number of characters to keep at the start, at most `max_chars - 2`; half of them by default.

    Returns:
        The text itself if it is short enough, else its start and its end with "…" between them.

    Example:
        >>> shorten_middle("connection to 10.0.0.1 refused", 20, head_chars=11)
        'connection … refused'
    """
    if len(text) <= max_chars:
        return text
    head = (max_chars - 1) // 2 if head_chars is None else head_chars
    return f"{text[:head]}…{text[head + 1 - max_chars :]}"
