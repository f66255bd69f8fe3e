"""Images are read from every form that people have, with the pixels that an engine and a trainer agree on."""

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll.errors import ConfigError
from toolroll.images import (
    ImageSpan,
    collapse_images,
    has_images,
    image_content,
    images_of,
    read_image,
    replace_images,
    with_images,
)
from toolroll.rollout.chat.image_tokens import ImageTokens
from toolroll.schemas import Message

NOISE = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
PICTURE = PIL.Image.fromarray(NOISE)
PLACEHOLDER = 7


def encoded(image: PIL.Image.Image, form: str, **options: Any) -> bytes:
    output = BytesIO()
    image.save(output, form, **options)
    return output.getvalue()


PNG = encoded(PICTURE, "PNG")
PNG_URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


@pytest.mark.parametrize(
    "value",
    [PICTURE, NOISE, PNG, bytearray(PNG), PNG_URL, {"bytes": PNG, "path": None}, read_image(PNG)],
    ids=["pil", "array", "bytes", "bytearray", "url", "data set", "image"],
)
def test_every_form_has_the_same_pixels(value: Any) -> None:
    image = read_image(value)
    assert (image.width, image.height) == (64, 48)
    assert (np.asarray(image.to_pil()) == NOISE).all()


def test_paths_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(PNG)
    assert read_image(file) == read_image(str(file)) == read_image(f"file://{file}") == read_image({"path": str(file)})


def test_files_keep_their_bytes_and_their_hash() -> None:
    for data in (PNG, encoded(PICTURE, "JPEG"), encoded(PICTURE, "WEBP")):
        assert read_image(data).data == data
    assert read_image(PNG).hash == read_image(PNG_URL).hash != read_image(encoded(PICTURE, "JPEG")).hash


def test_transparency_becomes_white() -> None:
    transparent = PIL.Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    for value in (transparent, encoded(transparent, "PNG"), encoded(transparent, "GIF")):
        assert (np.asarray(read_image(value).to_pil()) == 255).all()


def test_rotation_of_cameras_is_applied() -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    image = read_image(encoded(PICTURE, "PNG", exif=exif))
    assert (image.width, image.height) == (48, 64)
    assert (np.asarray(image.to_pil()) == np.rot90(NOISE, -1)).all()
    assert image.to_pil().getexif().get(0x0112) is None


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK", "LA", "I;16"])
def test_other_modes_become_rgb(mode: str) -> None:
    image = read_image(PIL.Image.new(mode, (8, 8)))
    assert image.to_pil().mode == "RGB"
    assert image.media_type == "image/png"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("https://example.com/a.png", "not downloaded"),
        (b"not an image", "Cannot read an image"),
        (PNG[:100], "Cannot read an image"),
        ("/no/such/file.png", "No such file"),
        ("data:image/png;base64,???", "Invalid data URL"),
        (3, "Expected an image, got int"),
        ({}, "Expected an image, got NoneType"),
    ],
)
def test_invalid_images_are_explained(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_image(value)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": PNG},
        {"type": "image_url", "image_url": {"url": PNG_URL}},
        {"type": "image_url", "image_url": PNG_URL},
        {"type": "image", "url": PNG_URL},
        {"type": "image", "base64": base64.b64encode(PNG).decode()},
        {"image": PICTURE},
    ],
)
def test_image_parts_of_all_conventions(part: dict[str, Any]) -> None:
    message = Message(role="user", content=[part, {"type": "text", "text": "?"}])
    assert has_images([message])
    [converted] = with_images([message])
    assert [image.width for image in images_of([converted])] == [64]
    assert with_images([converted]) == [converted]
    assert converted.content == image_content(images_of([converted]), "?")
    [replaced] = replace_images([message], [PIL.Image.new("RGB", (5, 5))])
    assert [image.width for image in images_of([replaced])] == [5]


def test_videos_and_sound_are_refused() -> None:
    for kind in ("video", "input_audio"):
        message = Message(role="user", content=[{"type": kind, kind: "a.mp4"}])
        assert not has_images([message])
        with pytest.raises(ConfigError, match=f"Unsupported content part of type '{kind}'"):
            with_images([message])


def test_nulls_of_tables_are_removed() -> None:
    """A table has every key in every part."""
    parts = [
        {"type": "image", "image": {"bytes": PNG, "path": None}, "text": None, "video": None},
        {"type": "text", "image": None, "text": "What?", "video": None},
    ]
    [message] = with_images([Message(role="user", content=parts)])
    assert message.content == image_content(images_of([message]), "What?")
    assert len(images_of([message])) == 1
    with pytest.raises(ConfigError, match="type 'video'"):
        with_images([Message(role="user", content=[{"type": "video", "video": "a.mp4", "text": None}])])


def test_images_belong_to_users_and_tools() -> None:
    with pytest.raises(ConfigError, match="role 'system'"):
        with_images([Message(role="system", content=[{"type": "image", "image": PNG}])])


def test_chat_servers_get_what_they_can_read() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "https://a/b.png"}}, {"type": "input_audio", "input_audio": {}}]
    [message] = with_images([Message(role="user", content=[*parts, {"image": PICTURE}])], keep_others=True)
    assert isinstance(message.content, list)
    assert message.content[:2] == parts
    assert len(images_of([message])) == 1


def test_replacing_another_number_of_images_fails() -> None:
    message = Message(role="user", content=[{"image": PNG}, {"image": PNG}, {"type": "text", "text": "Compare."}])
    with pytest.raises(ConfigError, match="have 2 images, but 1 were loaded"):
        replace_images([message], [PICTURE])


def test_dumps_of_messages_contain_the_hash_only() -> None:
    [message] = with_images([Message(role="user", content=[{"image": PNG}])])
    [part] = json.loads(message.model_dump_json())["content"]
    assert part["image"] == {"hash": read_image(PNG).hash, "media_type": "image/png", "width": 64, "height": 48}


def test_16_bits_are_scaled_and_floats_refused() -> None:
    gradient = np.linspace(0, 65535, 64 * 48).reshape(48, 64)
    shown = np.asarray(read_image(gradient.astype(np.uint16)).to_pil())[..., 0]
    assert np.abs(shown - gradient / 256).max() <= 1
    with pytest.raises(ConfigError, match="8 bits per channel"):
        read_image(gradient.astype(np.float32))


def test_text_is_no_image() -> None:
    messages = [Message(role="user", content="x"), Message(role="user", content=[{"type": "text", "text": "image"}])]
    assert not has_images(messages)
    assert with_images(messages) == messages


class FixedTokens(ImageTokens):
    """Images of width n have n tokens."""

    def __init__(self) -> None:
        super().__init__("", PLACEHOLDER)

    def count(self, image: Any) -> int:
        return int(image.width)


@given(st.lists(st.tuples(st.lists(st.integers(10, 20)), st.integers(1, 9))), st.lists(st.integers(10, 20)))
def test_expanded_ids_collapse_to_the_same(pieces: list[tuple[list[int], int]], tail: list[int]) -> None:
    images = [read_image(PIL.Image.new("RGB", (width, 1))) for _, width in pieces]
    ids = [token_id for before, _ in pieces for token_id in (*before, PLACEHOLDER)] + tail
    expanded, spans = FixedTokens().expand(ids, images)
    assert collapse_images(expanded, spans) == ids
    assert [span.image for span in spans] == images
    assert [span.end - span.start for span in spans] == [width for _, width in pieces]
    inside = {position for span in spans for position in range(span.start, span.end)}
    assert inside == {position for position, token_id in enumerate(expanded) if token_id == PLACEHOLDER}


def test_text_that_spells_a_placeholder_is_refused() -> None:
    with pytest.raises(ValueError, match="has 0 images, but its text shows 1"):
        FixedTokens().expand([PLACEHOLDER], [])


def test_spans_are_shifted() -> None:
    image = read_image(PICTURE)
    assert ImageSpan(image, 2, 5).shifted(10) == ImageSpan(image, 12, 15)
