"""How a model shows images: by a range of placeholder tokens, one for each patch of the image.

A chat template writes one placeholder for each image. The ids of a conversation have as many as the model's image
processor makes of it, so that limits, log-probabilities and the trainer count what the model sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from toolroll.errors import ConfigError, MissingExtra
from toolroll.images import Image, ImageSpan
from toolroll.rollout.chat.model_files import read_model_file


class ImageTokens:
    """The placeholders of a model like Qwen-VL: each image is one id, repeated.

    Args:
        model: Directory or name of the model.
        token_id: Id of the placeholder.
    """

    def __init__(self, model: str, token_id: int) -> None:
        self.token_id = token_id
        self._model = model

    @classmethod
    def find(cls, tokenizer: Any) -> ImageTokens | None:
        """Return the placeholders of a tokenizer's model, or None if its config.json has no `image_token_id`."""
        token_id = read_model_file(tokenizer, "config.json").get("image_token_id")
        return cls(tokenizer.name_or_path, token_id) if isinstance(token_id, int) else None

    def count(self, image: Image) -> int:
        """Return the number of placeholders of an image.

        Raises:
            ConfigError: If the image processor cannot be loaded, or does not state the number.
            ValueError: If the image processor rejects the size of the image.
        """
        processor = self._processor
        patches: int = processor.get_number_of_image_patches(image.height, image.width, {})
        return max(1, patches // int(processor.merge_size) ** 2)

    def expand(self, ids: Sequence[int], images: Sequence[Image]) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """Replace the placeholder of each image by as many as the image has.

        Args:
            ids: Ids with one placeholder for each image.
            images: The images, in order.

        Returns:
            The ids, and the range of each image in them.

        Raises:
            ConfigError: As for `count`.
            ValueError: If the numbers of placeholders and images differ, or an image is rejected.
        """
        positions = [position for position, token_id in enumerate(ids) if token_id == self.token_id]
        if len(positions) != len(images):
            raise ValueError(f"the conversation has {len(images)} images, but its text shows {len(positions)}")
        expanded: list[int] = []
        spans: list[ImageSpan] = []
        after = 0
        for position, image in zip(positions, images, strict=True):
            expanded += ids[after:position]
            start = len(expanded)
            expanded += [self.token_id] * self.count(image)
            spans.append(ImageSpan(image, start, len(expanded)))
            after = position + 1
        return [*expanded, *ids[after:]], tuple(spans)

    @cached_property
    def _processor(self) -> Any:
        try:
            from transformers import AutoImageProcessor
        except ImportError as error:
            raise MissingExtra("transformers", "rollout") from error
        try:
            load: Any = AutoImageProcessor.from_pretrained
            processor = load(self._model, local_files_only=True)
        except Exception as error:  # transformers raises many types
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"Cannot load the image processor of {self._model!r}: {reason:.200} Install toolroll[images]."
            ) from error
        if not hasattr(processor, "get_number_of_image_patches") or not hasattr(processor, "merge_size"):
            raise ConfigError(
                f"Images are not supported with {type(processor).__name__}. Supported are models that show an image as "
                "one repeated token, such as Qwen3-VL."
            )
        return processor
