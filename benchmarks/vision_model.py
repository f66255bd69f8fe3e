"""A small vision model with random weights, and log-probabilities of transformers to compare an engine with.

    python benchmarks/vision_model.py make TOKENIZER_DIR MODEL_DIR
    python benchmarks/vision_model.py score MODEL_DIR < sequences.json

It runs in an environment with torch and transformers, and imports nothing of toolroll. The model has the architecture
of Qwen3-VL and 10 million parameters. `score` reads a list of `{"ids": [int], "images": [base64]}`, and writes for each
the log-probabilities of its ids, as they are and with the last image painted white.
"""

from __future__ import annotations

import base64
import json
import shutil
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5000000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 128,
    "out_hidden_size": 64,
    "patch_size": 16,
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [0, 1],
}
IMAGES: dict[str, Any] = {
    "size": {"shortest_edge": 1024, "longest_edge": 16777216},
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
WEIGHT_SCALE = 0.15
"""Standard deviation of the weights, large enough that an image changes the probabilities clearly."""


def make(tokenizer_dir: Path, model_dir: Path) -> None:
    """Write the model, with the tokenizer and chat template of `tokenizer_dir`."""
    import torch
    from transformers import (
        AutoTokenizer,
        Qwen2VLImageProcessor,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    shutil.copytree(tokenizer_dir, model_dir)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    ids: dict[str, Any] = {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    shared: dict[str, Any] = {"tie_word_embeddings": True, "dtype": "float32"}
    text = {**TEXT, **shared, "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>")}
    torch.manual_seed(0)
    make_model: Any = Qwen3VLForConditionalGeneration  # without types in some versions
    model = make_model(Qwen3VLConfig(text_config=text, vision_config=VISION, **shared, **ids))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, WEIGHT_SCALE)
    model.save_pretrained(model_dir)
    make_processor: Any = Qwen3VLProcessor
    make_processor(
        image_processor=Qwen2VLImageProcessor(**IMAGES),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(),
        chat_template=(tokenizer_dir / "chat_template.jinja").read_text(),
    ).save_pretrained(model_dir)


def score(model_dir: Path, sequences: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
    """Return the log-probabilities of each sequence: `seen` with its images, `blank` with the last one white."""
    import PIL.Image
    from transformers import AutoImageProcessor, Qwen3VLForConditionalGeneration

    load: Any = AutoImageProcessor.from_pretrained
    processor = load(model_dir, backend="torchvision")
    model = Qwen3VLForConditionalGeneration.from_pretrained(model_dir, dtype="float32")
    model.train(False)
    scores = []
    for sequence in sequences:
        images = [PIL.Image.open(BytesIO(base64.b64decode(data))) for data in sequence["images"]]
        blank = [*images[:-1], PIL.Image.new("RGB", images[-1].size, "white")]
        seen, blanked = (_logprobs(model, processor, sequence["ids"], shown) for shown in (images, blank))
        scores.append({"seen": seen, "blank": blanked})
    return scores


def _logprobs(model: Any, processor: Any, ids: list[int], images: list[Any]) -> list[float]:
    """Return the log-probability of each id after the first."""
    import torch

    pixels = processor(images=images, return_tensors="pt")
    input_ids = torch.tensor([ids])
    types = (input_ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=input_ids, mm_token_type_ids=types, **pixels).logits[0, :-1]
    chosen = torch.log_softmax(logits.float(), -1).gather(1, input_ids[0, 1:, None])
    result: list[float] = chosen[:, 0].tolist()
    return result


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", tokenizer_dir, model_dir]:
            make(Path(tokenizer_dir), Path(model_dir))
        case ["score", model_dir]:
            print(json.dumps(score(Path(model_dir), json.load(sys.stdin))))
        case _:
            sys.exit(__doc__)
