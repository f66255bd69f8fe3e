"""Images in messages and tool responses.

An `Image` is encoded bytes, identified by their hash. It is RGB without transparency or rotation, so that an inference
engine and a trainer, which treat these differently, see the same pixels.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from toolroll.errors import ConfigError, MissingExtra
from toolroll.schemas import JsonDict, Message

KEPT_FORMATS = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}
"""Formats that every engine reads. Other images are converted to PNG."""
EXIF_ORIENTATION = 0x0112
PNG_COMPRESSION = 1
"""Fast, and lossless as all levels are."""
IMAGE_KEYS = ("image", "image_url", "url", "path", "base64")
"""Keys of a content part that refer to an image."""
IMAGE_ROLES = ("user", "tool")
REMOTE = ("http://", "https://")


@dataclass(frozen=True)
class Image:
    """An image. Created by `read_image`."""

    hash: str
    """SHA-256 of the data, as hexadecimal digits."""
    media_type: str
    """For example "image/png"."""
    width: int
    height: int

    @classmethod
    def from_data(cls, data: bytes, media_type: str, size: tuple[int, int]) -> Image:
        """Return the image of encoded bytes."""
        image = cls(hashlib.sha256(data).hexdigest(), media_type, *size)
        object.__setattr__(image, "_data", data)  # not a field, so that dumps of messages contain the hash only
        return image

    @property
    def data(self) -> bytes:
        """The encoded image."""
        data: bytes = self.__dict__["_data"]
        return data

    @property
    def url(self) -> str:
        """The image as a data URL."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode('ascii')}"

    @property
    def file_name(self) -> str:
        """Name of a file for the image: its hash and the suffix of its type."""
        return f"{self.hash}.{self.media_type.removeprefix('image/')}"

    def to_pil(self) -> Any:
        """Return the image as a `PIL.Image.Image`."""
        import PIL.Image

        return PIL.Image.open(BytesIO(self.data)).convert("RGB")


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """A range of tokens that stands for an image, from `start` to `end` (exclusive)."""

    image: Image
    start: int
    end: int

    def shifted(self, offset: int) -> ImageSpan:
        """Return the span in a sequence with `offset` more tokens before it."""
        return ImageSpan(self.image, self.start + offset, self.end + offset)


def read_image(value: Any) -> Image:
    """Read an image.

    Args:
        value: An `Image`, a `PIL.Image.Image`, an array (height × width × 3, 8 bits), the bytes of an image file, a
            path, a data URL, or a mapping with `bytes` or `path`, as in a data set of images.

    Returns:
        The image. JPEG, PNG and WebP keep their bytes unless they have transparency or a rotation.

    Raises:
        MissingExtra: If Pillow is not installed.
        ConfigError: If the value is not an image.

    Example:
        >>> import PIL.Image
        >>> image = read_image(PIL.Image.new("RGB", (64, 48)))
        >>> image.media_type, image.width, image.height
        ('image/png', 64, 48)
    """
    if isinstance(value, Image):
        return value
    try:
        import PIL.Image
    except ImportError as error:
        raise MissingExtra("PIL", "images") from error
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    try:
        if isinstance(value, PIL.Image.Image):
            return _encode(value)
        if hasattr(value, "__array_interface__"):
            return _encode(PIL.Image.fromarray(value))
        data = bytes(value) if isinstance(value, bytes | bytearray | memoryview) else _load(value)
        with PIL.Image.open(BytesIO(data)) as opened:
            opened.load()
            media_type = KEPT_FORMATS.get(opened.format or "")
            if media_type is None or not _is_plain(opened):
                return _encode(opened)
            return Image.from_data(data, media_type, opened.size)
    except ConfigError:
        raise
    except Exception as error:  # Pillow raises many types for damaged images
        reason = str(error) or type(error).__name__
        raise ConfigError(f"Cannot read an image from {value!r:.60}: {reason:.200}.") from error


def with_images(messages: Iterable[Message], *, keep_others: bool = False) -> list[Message]:
    """Return messages whose image parts are `{"type": "image", "image": Image}`.

    Args:
        messages: Messages with image parts in the form of OpenAI, transformers or verl. Keys of a part whose value is
            None are removed: a table has every key in every part.
        keep_others: Keep videos, audio and URLs of other machines, which chat servers understand.

    Returns:
        The messages. Those whose content is a text are not copied.

    Raises:
        ConfigError: If an image cannot be read or is in a message of another role than user and tool, or a message has
            a video or audio.
    """
    return [_with_images(message, keep_others=keep_others) for message in messages]


def replace_images(messages: Sequence[Message], values: Sequence[Any]) -> list[Message]:
    """Return messages in which the image parts have other images.

    Args:
        messages: Messages with image parts in any form.
        values: The images, in order, as `read_image` takes them.

    Raises:
        ConfigError: As for `with_images`, or if the number of image parts is another.
    """
    count = sum(_is_image(part) for message in messages for part in _parts(message))
    if count != len(values):
        raise ConfigError(f"The messages have {count} images, but {len(values)} were loaded.")
    remaining = iter(values)
    replaced = [
        message.model_copy(
            update={"content": [{"image": next(remaining)} if _is_image(part) else part for part in parts]}
        )
        if (parts := _parts(message))
        else message
        for message in messages
    ]
    return with_images(replaced)


def images_of(messages: Iterable[Message]) -> list[Image]:
    """Return the images of messages that `with_images` returned, in order."""
    parts = (part for message in messages for part in _parts(message))
    return [image for part in parts if isinstance(image := part.get("image"), Image)]


def has_images(messages: Iterable[Message]) -> bool:
    """Return True if a message has an image part, in any form."""
    return any(_is_image(part) for message in messages for part in _parts(message))


def image_content(images: Sequence[Image], text: str) -> str | list[JsonDict]:
    """Return the content of a message: the text, preceded by the images."""
    if not images:
        return text
    parts: list[JsonDict] = [{"type": "image", "image": image} for image in images]
    return [*parts, {"type": "text", "text": text}] if text else parts


def collapse_images(ids: Sequence[int], spans: Iterable[ImageSpan]) -> list[int]:
    """Return ids with one placeholder for each image, as engines expect them beside the images."""
    collapsed: list[int] = []
    position = 0
    for span in spans:
        collapsed += ids[position : span.start + 1]
        position = span.end
    return [*collapsed, *ids[position:]]


def _parts(message: Message) -> list[JsonDict]:
    return message.content if isinstance(message.content, list) else []


def _with_images(message: Message, *, keep_others: bool) -> Message:
    parts = _parts(message)
    if not parts:
        return message
    if message.role not in IMAGE_ROLES and any(map(_is_image, parts)):
        raise ConfigError(f"An image is in a message of the role {message.role!r}. Put it into a user message.")
    return message.model_copy(update={"content": [_read_part(part, keep_others=keep_others) for part in parts]})


def _read_part(part: JsonDict, *, keep_others: bool) -> JsonDict:
    part = {key: value for key, value in part.items() if value is not None}
    if _is_image(part):
        value = _image_value(part)
        is_remote = isinstance(value, str) and value.startswith(REMOTE)
        return part if keep_others and is_remote else {"type": "image", "image": read_image(value)}
    if part.get("type", "text") == "text" or keep_others:
        return part
    raise ConfigError(
        f"Unsupported content part of type {str(part.get('type'))!r}. Use parts with text, or images with their data: "
        '{"type": "image", "image": …}.'
    )


def _is_image(part: JsonDict) -> bool:
    has_value = any(part.get(key) is not None for key in IMAGE_KEYS)
    return has_value and part.get("type", "image") in ("image", "image_url", "input_image")


def _image_value(part: JsonDict) -> Any:
    """Return what an image part refers to."""
    key = next(key for key in IMAGE_KEYS if part.get(key) is not None)
    value = part[key]
    if key == "image_url" and isinstance(value, Mapping):
        return value.get("url")
    return f"data:image/png;base64,{value}" if key == "base64" else value


def _load(value: Any) -> bytes:
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"Expected an image, got {type(value).__name__}. Pass a PIL image, bytes or a path.")
    text = os.fspath(value)
    if text.startswith(REMOTE):
        raise ConfigError(f"Images are not downloaded, got {text:.60}. Download it, and pass its path.")
    if text.startswith("data:"):
        try:
            return base64.b64decode(text.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise ConfigError(f"Invalid data URL: {error}.") from error
    return Path(text.removeprefix("file://")).read_bytes()


def _is_plain(image: Any) -> bool:
    is_single = getattr(image, "n_frames", 1) == 1
    is_upright = image.getexif().get(EXIF_ORIENTATION, 1) == 1
    return is_single and is_upright and image.mode == "RGB" and not image.has_transparency_data


def _encode(image: Any) -> Image:
    """Return the image as PNG, upright and on white."""
    from PIL import Image as PILImage
    from PIL import ImageOps

    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value / 256).convert("L")  # Pillow would cut off what exceeds 8 bits
    elif image.mode in ("I", "F"):
        raise ConfigError(
            "Expected an image with 8 bits per channel. Convert it, for example with numpy's astype(uint8)."
        )
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        transparent = image.convert("RGBA")
        image = PILImage.new("RGBA", image.size, "white")
        image.alpha_composite(transparent)
    output = BytesIO()
    rgb = image.convert("RGB")
    rgb.save(output, "PNG", compress_level=PNG_COMPRESSION)
    return Image.from_data(output.getvalue(), "image/png", rgb.size)
