"""Convert results of MCP tools to tool responses."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from toolroll.errors import InfraFault, PolicyFault
from toolroll.schemas import ToolResponse

if TYPE_CHECKING:
    from mcp_types import CallToolResult


def to_response(tool_name: str, result: CallToolResult, *, returns_images: bool) -> ToolResponse:
    """Convert a result.

    Args:
        tool_name: Name of the tool, for messages.
        result: The result.
        returns_images: Whether to pass on images. Otherwise the text states that there is one.

    Returns:
        The text parts, one per line, and the images. A result that has only structured content is JSON.

    Raises:
        PolicyFault: If the result is an error of the tool. Its text is the message.
        InfraFault: If the data of an image is invalid.
    """
    images = [_decode(tool_name, part.data) for part in result.content if part.type == "image" and returns_images]
    text = "\n".join(_texts(result.content, returns_images=returns_images))
    if not result.content and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    if result.is_error:
        raise PolicyFault(text or f"The tool {tool_name!r} failed without a message.")
    return ToolResponse(text=text, image=images or None)


def _texts(content: Iterable[Any], *, returns_images: bool) -> Iterable[str]:
    for part in content:
        match part.type:
            case "text":
                yield part.text
            case "image" if returns_images:
                pass
            case "image" | "audio":
                yield f"({part.type}: {part.mime_type})"
            case "resource_link":
                yield f"{part.name}: {part.uri}"
            case "resource":
                text = getattr(part.resource, "text", None)
                yield text if text is not None else f"(resource: {part.resource.uri})"


def _decode(tool_name: str, data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise InfraFault(f"The MCP tool {tool_name!r} returned an invalid image: {error}.") from error
