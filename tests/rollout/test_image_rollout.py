"""Images in prompts and tool responses: their tokens, the requests to engines, and models that cannot see them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from sandbox.fault_server import FaultServer, answer

from rollout import small_tokenizer
from rollout.fake_servers import FakeVLLM
from rollout.scripted_model import Model, call
from rollout.test_engine_answers import sglang_answer
from toolroll import BaseTool, Rollout, SGLangEngine, ToolResponse, ToolResult, VLLMEngine
from toolroll.errors import ConfigError, EngineRefused, EngineUnavailable
from toolroll.images import ImageSpan, collapse_images, images_of, read_image
from toolroll.records.reader import read_records
from toolroll.records.schema import RecordLine
from toolroll.records.writer import RecordWriter
from toolroll.rollout.chat.formats import load_rendering
from toolroll.rollout.chat.rendering import Rendering
from toolroll.rollout.engines.base import Generation
from toolroll.rollout.engines.openai import _to_wire
from toolroll.rollout.engines.scripted import ScriptedEngine
from toolroll.rollout.trajectory import Fidelity, FinishReason, Trajectory
from toolroll.schemas import JsonDict, Message
from toolroll.viewer.documents.conversation import conversation

TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
SHOW_IMAGE = "{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{%- if tools -%}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif -%}"
    "{%- for message in messages -%}"
    "<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}\n"
    "{% if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}" + SHOW_IMAGE + "{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}"
    "{%- endif -%}"
    "{%- for call in message.tool_calls or [] -%}"
    "<tool_call>\n{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>"
    "{%- endfor -%}<|im_end|>\n"
    "{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)
BLIND_TO_TOOLS = TEMPLATE.replace("part.type == 'image'", "part.type == 'image' and message.role != 'tool'")
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 16, "longest_edge": 4096},
    "patch_size": 2,
    "merge_size": 2,
    "temporal_patch_size": 2,
}


def picture(width: int, height: int) -> PIL.Image.Image:
    """Return an image with `width * height` tokens."""
    return PIL.Image.new("RGB", (4 * width, 4 * height), (width, height, 0))


class Camera(BaseTool[None]):
    default_schema: JsonDict = {"type": "function", "function": {"name": "look", "description": "Look."}}  # noqa: RUF012
    returns_images = True

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        return ToolResult(ToolResponse(image=[picture(3, 2)], text="seen <|image_pad|>"), None, {})


class Undeclared(Camera):
    returns_images = False


class Recorder(ScriptedEngine):
    """Keeps what it was asked."""

    asked: list[tuple[list[int], dict[str, Any], list[ImageSpan]]]

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **options: Any
    ) -> Generation:
        self.asked.append((list(prompt_ids), dict(sampling_params), list(options.get("images", ()))))
        return await super().generate(request_id, prompt_ids, sampling_params, **options)


class Textual:
    """An engine that knows nothing of images."""

    logprobs_mode = "processed_logprobs"

    async def generate(
        self, request_id: str, prompt_ids: Any, sampling_params: Any, *, deadline: Any = None, affinity: Any = None
    ) -> Generation:
        raise NotImplementedError

    async def abort(self, request_id: str) -> None: ...

    async def close(self) -> None: ...


def make_model(directory: Path, template: str = TEMPLATE) -> tuple[Any, Path]:
    tokenizer = small_tokenizer.make(
        (*small_tokenizer.CHATML, *TOKENS), small_tokenizer.MARKERS, chat_template=template
    )
    tokenizer.save_pretrained(directory)
    image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "image_token_id": image_token_id}))
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return tokenizer, directory


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Model:
    tokenizer, directory = make_model(tmp_path_factory.mktemp("vision"))
    return Model(tokenizer, load_rendering(str(directory)))


def question(width: int = 4, height: int = 5) -> JsonDict:
    parts = [{"type": "image", "image": picture(width, height)}, {"type": "text", "text": "What is it?"}]
    return {"prompt": [{"role": "user", "content": parts}]}


async def run(model: Model, turns: Sequence[str | list[int]], **more: Any) -> Trajectory:
    engine = Recorder([turn if isinstance(turn, list) else model.ids(turn) for turn in turns])
    engine.asked = []
    trajectory = await model.run(turns, more.pop("tools", [Camera()]), engine=engine, prompt=question(), **more)
    trajectory.extra = {"engine": engine}
    return trajectory


LOOK_TWICE = (call("look"), call("look"), "A cat.")


async def test_images_of_prompt_and_responses_are_ranges_of_tokens(seeing: Model) -> None:
    trajectory = await run(seeing, LOOK_TWICE)
    tokens = trajectory.tokens
    assert trajectory.fidelity is Fidelity.EXACT
    assert [span.end - span.start for span in tokens.images] == [20, 6, 6]
    for span in tokens.images:
        assert set(tokens.ids[span.start : span.end]) == {seeing.rendering.image_token_id}
        assert not any(tokens.mask[span.start : span.end])
    assert tokens.ids.count(seeing.rendering.image_token_id) == 32
    assert [image.width for image in images_of(trajectory.messages)] == [16, 12, 12]
    assert [len(record.images) for record in trajectory.calls] == [1, 1]


async def test_the_prompt_is_that_of_the_template(seeing: Model) -> None:
    trajectory = await run(seeing, LOOK_TWICE)
    engine = trajectory.extra["engine"]
    shown = [
        {**message, "content": [{"type": "image"} if "image" in part else part for part in message["content"]]}
        for message in question()["prompt"]
    ]
    expected = seeing.tokenizer.apply_chat_template(
        shown, tools=[Camera().tool_schema.model_dump()], add_generation_prompt=True, return_dict=False
    )
    ids, _, images = engine.asked[0]
    assert collapse_images(ids, images) == expected
    assert [len(images) for _, _, images in engine.asked] == [1, 2, 3]
    for ids, _, images in engine.asked:
        assert all(set(ids[span.start : span.end]) == {seeing.rendering.image_token_id} for span in images)
        assert collapse_images(ids, images).count(seeing.rendering.image_token_id) == len(images)


async def test_model_cannot_sample_a_placeholder(seeing: Model) -> None:
    trajectory = await run(seeing, LOOK_TWICE, sampling_params={"logit_bias": {"5": 1.0}})
    expected = {"5": 1.0, str(seeing.rendering.image_token_id): -100.0}
    assert [params["logit_bias"] for _, params, _ in trajectory.extra["engine"].asked] == [expected] * 3
    trajectory = await run(seeing, [[5, seeing.rendering.image_token_id or 0, seeing.rendering.stop_ids[0]]])
    assert trajectory.outcome == "infra"
    assert "stands for an image" in (trajectory.error or "")


async def test_image_that_does_not_fit_ends_the_trajectory(seeing: Model) -> None:
    turn = len(seeing.ids(LOOK_TWICE[0]))
    trajectory = await run(seeing, LOOK_TWICE, limits={"max_response_len": turn + 10})
    assert trajectory.finish_reason is FinishReason.LENGTH
    assert len(trajectory.tokens.images) == 1


async def test_images_are_rendered_again_with_their_conversation(seeing: Model, tmp_path: Path) -> None:
    stripping = Model(seeing.tokenizer, load_rendering(str(make_model(tmp_path)[1]), thinking="strip"))
    turns = ["<think>\nHm.\n</think>\n\n" + LOOK_TWICE[0], *LOOK_TWICE[1:]]
    trajectory = await run(stripping, turns)
    assert trajectory.fidelity is Fidelity.RERENDERED
    assert [span.end - span.start for span in trajectory.tokens.images] == [20, 6, 6]
    assert [len(stream.images) for stream in trajectory.earlier] == [1]


async def test_text_model_is_refused(rendering: Rendering, model: Model) -> None:
    with pytest.raises(ConfigError, match=r"no image_token_id.*Use a model with vision"):
        Rollout(engine=model.engine([]), rendering=rendering, tools=[Camera()])
    rollout = Rollout(engine=model.engine(["Hi"]), rendering=rendering)
    with pytest.raises(ConfigError, match="no image_token_id"):
        await rollout.sample(question())


async def test_engine_without_images_refuses_a_prompt(seeing: Model) -> None:
    rollout = Rollout(engine=Textual(), rendering=seeing.rendering)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Textual takes no images"):
        await rollout.sample(question())


async def test_unreadable_image_of_a_prompt_is_refused(seeing: Model) -> None:
    rollout = Rollout(engine=seeing.engine([]), rendering=seeing.rendering)
    for part in ({"type": "image", "image": "/no/such.png"}, {"type": "video", "video": "a.mp4"}):
        with pytest.raises(ConfigError):
            await rollout.sample([{"role": "user", "content": [part]}])


async def test_image_of_an_impossible_shape_is_explained_to_the_model(seeing: Model) -> None:
    class Slit(Camera):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
            return ToolResult(ToolResponse(image=[PIL.Image.new("RGB", (2, 4000))]), 1.0, {})

    trajectory = await run(seeing, [call("look"), "Nothing."], tools=[Slit()])
    assert trajectory.outcome == "ok"
    assert trajectory.calls[0].fault == "policy"
    assert "2 × 4000 pixels cannot be shown" in str(trajectory.messages[2].content)
    assert trajectory.calls[0].reward is None


def test_template_that_numbers_images_is_refused(tmp_path: Path) -> None:
    counting = TEMPLATE.replace("<|vision_start|>", "Picture {{ loop.index }}: <|vision_start|>")
    make_model(tmp_path, counting)
    with pytest.raises(ConfigError, match="numbers the images"):
        Rollout(engine=ScriptedEngine([]), tokenizer=str(tmp_path), tools=[Camera()])


async def test_text_has_no_logit_bias(seeing: Model) -> None:
    """vLLM allows none together with speculative decoding."""
    engine = Recorder([seeing.ids("Hi")])
    engine.asked = []
    await seeing.run(["Hi"], engine=engine)
    assert "logit_bias" not in engine.asked[0][1]


async def test_image_of_a_tool_that_did_not_declare_it(rendering: Rendering, model: Model) -> None:
    trajectory = await model.run([call("look"), "Hi"], [Undeclared()])
    assert trajectory.outcome == "infra"
    assert "Tool 'look' returned an image. The model has no images" in (trajectory.error or "")


def test_template_without_images_in_responses_is_refused(tmp_path: Path) -> None:
    tokenizer, _ = make_model(tmp_path, BLIND_TO_TOOLS)
    engine = ScriptedEngine([])
    with pytest.raises(ConfigError, match=r"does not show images in tool messages.*tool_prompt: hermes"):
        Rollout(engine=engine, tokenizer=str(tmp_path), tools=[Camera()])
    rollout = Rollout(engine=engine, tokenizer=str(tmp_path), tools=[Camera()], tool_prompt="hermes")
    assert rollout.rendering
    image, end = read_image(picture(2, 2)), tokenizer.convert_tokens_to_ids("<|im_end|>")
    response = Message(role="tool", name="look", content=[{"image": image}, {"type": "text", "text": "seen"}])
    shown = rollout.rendering.bridge([1], [end], [response], messages=[], tools=[])
    text = rollout.rendering.decode(collapse_images(shown.ids, shown.images))
    assert "<tool_response>\n<|vision_start|><|image_pad|><|vision_end|>seen\n</tool_response>" in text


def test_engine_without_images_is_refused(seeing: Model) -> None:
    with pytest.raises(ConfigError, match="Textual takes no images"):
        Rollout(engine=Textual(), rendering=seeing.rendering, tools=[Camera()])  # type: ignore[arg-type]


def test_missing_image_processor_is_explained(tmp_path: Path) -> None:
    make_model(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="Cannot load the image processor"):
        Rollout(engine=ScriptedEngine([]), tokenizer=str(tmp_path), tools=[Camera()])


IDS = [1, 2, 9, 9, 9, 3]
SPANS = [ImageSpan(read_image(picture(1, 3)), 2, 5)]


@pytest.mark.parametrize("used", [IDS, [1, 2, 9, 9, 9, 4], [1, 2, 9, 3]])
async def test_vllm_gets_images_and_must_use_the_same_prompt(used: list[int]) -> None:
    server = FakeVLLM(scale_out=True, used_prompt=used)
    async with server.serve() as url, VLLMEngine(url) as engine:
        if used == IDS:
            await engine.generate("r", IDS, {"max_new_tokens": 5}, images=SPANS)
        else:
            with pytest.raises(EngineUnavailable, match="but the server used 4"):
                await engine.generate("r", IDS, {"max_new_tokens": 5}, images=SPANS)
    body = server.bodies["/inference/v1/generate"][0]
    assert body["token_ids"] == [1, 2, 9, 3]
    image = SPANS[0].image
    assert body["content_parts"] == [{"type": "image_url", "url": image.url, "uuid": image.hash}]


async def test_vllm_without_the_tokens_api_refuses_images() -> None:
    async with FakeVLLM(scale_out=False).serve() as url, VLLMEngine(url) as engine:
        with pytest.raises(EngineRefused, match="--enable-scale-out"):
            await engine.generate("r", IDS, {"max_new_tokens": 5}, images=SPANS)


@pytest.mark.virtual_time
@pytest.mark.parametrize("used", [6, 4])
async def test_sglang_gets_images_and_must_use_the_same_prompt(used: int) -> None:
    async with FaultServer([answer(200, sglang_answer(prompt_tokens=used))]) as server:
        async with SGLangEngine(server.url, vocab_size=100) as engine:
            if used == 6:
                await engine.generate("r", IDS, {"max_new_tokens": 5}, images=SPANS)
            else:
                with pytest.raises(EngineUnavailable, match="the prompt had 6 ids, but the server used 4"):
                    await engine.generate("r", IDS, {"max_new_tokens": 5}, images=SPANS)
        body = server.requests[0]
    assert body["input_ids"] == [1, 2, 9, 3]
    assert body["image_data"] == [SPANS[0].image.url]


def test_chat_servers_get_images_as_urls() -> None:
    image = read_image(picture(1, 1))
    message = Message(role="user", content=[{"type": "image", "image": image}, {"type": "text", "text": "?"}])
    expected = [{"type": "image_url", "image_url": {"url": image.url}}, {"type": "text", "text": "?"}]
    assert _to_wire(message) == {"role": "user", "content": expected}


async def test_records_have_images_by_hash(seeing: Model, tmp_path: Path) -> None:
    trajectory = await run(seeing, LOOK_TWICE)
    trajectory.extra = {}
    async with RecordWriter(tmp_path, writer="one") as writer:
        await writer.write_all([trajectory, trajectory], 1)
    images = images_of(trajectory.messages)
    assert {file.name: file.read_bytes() for file in (tmp_path / "images").iterdir()} == {
        image.file_name: image.data for image in images
    }
    [record, _] = read_records(tmp_path)
    RecordLine.model_validate(record.fields)
    [line, _] = (tmp_path / "one/1.jsonl").read_text().splitlines()
    assert all(image.url.partition(",")[2] not in line for image in images), "the data is not in the line"
    described = {"hash": images[0].hash, "media_type": "image/png", "width": 16, "height": 20}
    assert record.messages[0]["content"][0] == {"type": "image", "image": described}
    assert [span["image"]["hash"] for span in record.fields["tokens"]["images"]] == [image.hash for image in images]
    shown = "\n".join(block.text for block in conversation(record).blocks)
    assert f"[image, 16 × 20 pixels: images/{images[0].file_name}]" in shown
    assert f"[image, 12 × 8 pixels: images/{images[1].file_name}]" in shown
