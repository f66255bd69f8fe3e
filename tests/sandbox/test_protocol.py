"""Wire types: compatibility with SandboxFusion, and parsing of arbitrary messages."""

import contextlib
import json
from typing import Any

import pytest
import sandbox_fusion
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from toolroll.sandbox.protocol import (
    RunCodeRequest,
    RunCodeResponse,
    RunJupyterRequest,
    RunJupyterResponse,
    read,
)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RunCodeRequest, sandbox_fusion.RunCodeRequest),
        (RunCodeResponse, sandbox_fusion.RunCodeResponse),
        (RunJupyterRequest, sandbox_fusion.RunJupyterRequest),
        (RunJupyterResponse, sandbox_fusion.RunJupyterResponse),
    ],
)
def test_fields_of_sandbox_fusion_have_same_defaults(ours: Any, theirs: Any) -> None:
    for name, field in theirs.__fields__.items():
        mine = ours.model_fields[name]
        assert mine.is_required() == field.required or name == "message"
        if not field.required:
            assert mine.get_default(call_default_factory=True) == field.default


def test_fields_that_toolroll_adds_are_optional() -> None:
    request = read(RunCodeRequest, b'{"code": "", "language": "python"}')
    assert (request.deadline, request.session_id, request.idempotency_key) == (None, None, None)
    answer = read(RunCodeResponse, b'{"status": "Success", "message": ""}')
    assert (answer.queue_time, answer.session_is_new) == (None, None)
    assert read(RunJupyterRequest, b'{"cells": []}').deadline is None


@given(st.text(st.characters(blacklist_categories=[]), max_size=30))
def test_any_code_can_be_parsed(code: str) -> None:
    for ascii_only in (True, False):
        body = json.dumps({"code": code, "language": "python"}, ensure_ascii=ascii_only).encode(errors="surrogatepass")
        try:
            request = read(RunCodeRequest, body)
        except ValidationError:
            assert not ascii_only  # raw surrogates are not valid UTF-8
        else:
            request.code.encode()


def test_surrogate_pair_is_one_character() -> None:
    assert read(RunCodeRequest, b'{"code": "\\ud83d\\ude00 \\ud83d", "language": "python"}').code == "\U0001f600 \ufffd"


@given(st.binary(max_size=300))
def test_any_bytes_are_request_or_validation_error(body: bytes) -> None:
    with contextlib.suppress(ValidationError):
        assert isinstance(read(RunCodeRequest, body), RunCodeRequest)


def test_deep_nesting_is_a_validation_error() -> None:
    for body in (b"[" * 200_000, b'{"a":' * 200_000, b'{"code": "\\ud800", "language": ' + b"[" * 100_000):
        with pytest.raises(ValidationError):
            read(RunCodeRequest, body)
