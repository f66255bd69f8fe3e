"""Write the tables of docs/migration.md: each name of verl's original design, and its name in toolroll.

Usage: python scripts/make_migration_table.py

A table is placed between `<!-- names: GROUP -->` and `<!-- end of names -->`. `tests/test_migration.py` checks that
every reference below exists.
"""

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parent.parent / "docs/migration.md"
TABLE = re.compile(r"(<!-- names: (.+?) -->\n).*?(<!-- end of names -->)", re.DOTALL)


class Name(NamedTuple):
    """Something that can be imported, or an attribute of it."""

    path: str

    def __str__(self) -> str:
        return f"`{self.path}`"


class Setting(NamedTuple):
    """A field of a pydantic model, with dots for nested models."""

    model: str
    field: str

    def __str__(self) -> str:
        return f"`{self.field}` of `{self.model}`"


class Command(NamedTuple):
    """A command line. Words in capitals are placeholders."""

    line: str

    def __str__(self) -> str:
        return f"`{self.line}`"


class File(NamedTuple):
    """A file or directory of the repository."""

    path: str

    def __str__(self) -> str:
        return f"`{self.path}`"


class Test(NamedTuple):
    """A test function or class of the repository."""

    path: str
    name: str

    def __str__(self) -> str:
        return f"`{self.path}::{self.name}`"


class Text(NamedTuple):
    """A text that a module logs or returns."""

    module: str
    text: str

    def __str__(self) -> str:
        return f"`{self.text}`, from `{self.module}`"


Reference = Name | Setting | Command | File | Test | Text


class Row(NamedTuple):
    """One or several names of the original, their references in toolroll, and a note in Markdown."""

    original: str | tuple[str, ...]
    here: Reference | tuple[Reference, ...] = ()
    note: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the original."""
        return (self.original,) if isinstance(self.original, str) else self.original

    @property
    def references(self) -> tuple[Reference, ...]:
        """References in toolroll. Empty if the name has no counterpart."""
        # A reference is a tuple as well.
        return (self.here,) if isinstance(self.here, Reference) else self.here


SCHEMAS = "toolroll.schemas"
SANDBOX_SETTINGS = "toolroll.tools.sandbox_fusion_tool.SandboxFusionSettings"
RUN_CONFIG = "toolroll.RunConfig"
ENTRY = "toolroll.tools.registry.ToolEntry"
REQUEST = "toolroll.rollout.request.AsyncRolloutRequest"
STATE = "toolroll.rollout.request.RequestState"
PROMPT = "toolroll.Prompt"
RECORD = "toolroll.records.record.Record"
BUCKET = "toolroll.limiter.token_bucket"
GROUPS: dict[str, list[Row]] = {
    "classes": [
        Row("BaseTool", Name("toolroll.BaseTool"), "Same methods and signatures, so one class works in both."),
        Row("SandboxFusionTool", Name("toolroll.SandboxFusionTool"), "See [code interpreter](code-interpreter.md)."),
        Row("Gsm8kTool", Name("toolroll.Gsm8kTool"), "See [tools](tools.md#gsm8ktool-and-the-gsm8k-score)."),
        Row(
            "verl.tools.gsm8k_tool.Gsm8kTool",
            Name("toolroll.Gsm8kTool"),
            "Works as `class_name`, as does `verl.tools.sandbox_fusion_tools.SandboxFusionTool`.",
        ),
        Row("ToolResponse", Name("toolroll.ToolResponse"), "Same fields: `text`, `image`, `video`."),
        Row("ToolType", Name("toolroll.tools.registry.ToolType"), "Same members."),
        Row("NATIVE", Name("toolroll.tools.registry.ToolType.NATIVE"), "`type: native`, which is the default."),
        Row("MCP", Name("toolroll.tools.registry.ToolType.MCP"), "`type: mcp`, see [MCP tools](mcp.md)."),
        Row("OpenAIFunctionToolSchema", Name("toolroll.OpenAIFunctionToolSchema"), "All of JSON Schema is preserved."),
        Row("OpenAIFunctionSchema", Name(f"{SCHEMAS}.OpenAIFunctionSchema")),
        Row("OpenAIFunctionParametersSchema", Name(f"{SCHEMAS}.OpenAIFunctionParametersSchema")),
        Row("OpenAIFunctionPropertySchema", Name(f"{SCHEMAS}.OpenAIFunctionPropertySchema")),
        Row(
            "TokenBucketWorker",
            Name(f"{BUCKET}.TokenBucketWorker"),
            "One detached actor per resource, which leases slots to processes. Use `get_limiter`, see "
            "[limiter](limiter.md).",
        ),
        Row(
            "ExecutionWorker",
            Name("toolroll.ExecutionWorker"),
            "Same arguments. `execute` is a coroutine: use it as a Ray actor, or await it.",
        ),
        Row("PoolMode", Name("toolroll.PoolMode"), "`ProcessMode` is implemented."),
        Row("ThreadMode", Name("toolroll.PoolMode.ThreadMode"), "The default."),
        Row(
            "SGLangRollout",
            (Name("toolroll.Rollout"), Name("toolroll.SGLangEngine")),
            "The engine is a separate server. In a verl run, toolroll's agent loop uses verl's servers, see "
            "[verl](verl.md).",
        ),
        Row(
            ("AsyncRolloutRequest", "AsyncRolloutReq"),
            Name(REQUEST),
            "One conversation in progress. The result for the trainer is `toolroll.Trajectory`.",
        ),
        Row("RolloutViewer", Name("toolroll.viewer.app.RolloutViewer"), "See [viewer](viewer.md)."),
        Row("MyCustomTool", File("examples/custom_tool"), "Example of a tool class with state and settings."),
        Row("verl.tools.base_tool", Name("toolroll.tools.base_tool"), "Import `BaseTool` from `toolroll`."),
        Row("verl.tools.schemas", Name(SCHEMAS), "Import schemas and `ToolResponse` from `toolroll`."),
        Row("OmegaConf", Name("toolroll.tools.registry"), "Reads config files, with `${oc.env:NAME}`."),
    ],
    "methods": [
        Row("__init__", Name("toolroll.BaseTool.__init__"), "`(config, tool_schema)`, both optional."),
        Row(
            "create",
            Name("toolroll.BaseTool.create"),
            "Same signature; returns the id and a response. Most tools override only `new_state`.",
        ),
        Row(
            "execute",
            (Name("toolroll.BaseTool.execute"), Name("toolroll.ExecutionWorker.execute")),
            "A tool returns `(response, reward, metrics)`; the reward may be None. A worker runs a function.",
        ),
        Row("calc_reward", Name("toolroll.BaseTool.calc_reward"), "Called once, at the end of the trajectory."),
        Row(
            "acquire",
            (Name("toolroll.get_limiter"), Name("toolroll.Slot.acquire")),
            "`async with get_limiter(…).slot():`, or `with` in a thread. The actor has no such method: it cannot know "
            "its caller, so a dead caller would keep its slot, and a repeated `release` would free another's slot. "
            "A `Slot` belongs to its process, and returns if the process dies.",
        ),
        Row(
            "release",
            (Name("toolroll.BaseTool.release"), Name("toolroll.Slot.release")),
            "Of a tool: called exactly once. Of the limiter: see `acquire`.",
        ),
        Row(
            "get_current_count",
            (Name(f"{BUCKET}.TokenBucketWorker.get_current_count"), Command("toolroll limiter status")),
            "Slots in use, over all processes. `find_token_bucket(resource)` returns the actor.",
        ),
        Row("get_openai_tool_schema", Name("toolroll.BaseTool.get_openai_tool_schema")),
        Row(
            ("model_validate", "model_dump"),
            Name("toolroll.OpenAIFunctionToolSchema.model_validate"),
            "A dump has the keys in the given order, and no `enum: null`.",
        ),
        Row("initialize_tools_from_config", Name("toolroll.initialize_tools_from_config"), "Returns a list of tools."),
        Row(
            "get_tool_class",
            Name("toolroll.tools.registry.get_tool_class"),
            "Accepts the names of removed verl classes, and functions with `@tool`.",
        ),
        Row("to_container", Name("toolroll.tools.registry.read_entries"), "Reads a config without creating the tools."),
        Row(
            "init_execution_pool",
            Name("toolroll.init_execution_pool"),
            "Same arguments, and `resource`. The pool has a method `close`.",
        ),
        Row(
            "execution_pool.execute.remote",
            Name("toolroll.limiter.execution.PoolExecute.remote"),
            "Returns a Ray reference. `await pool.execute(fn, …)` also cancels the call if the caller is cancelled.",
        ),
        Row("_init_rate_limit", Name("toolroll.get_limiter"), "Cluster-wide if the process is connected to Ray."),
        Row(
            ("execute_code", "_process_single_case"),
            (Name("toolroll.SandboxClient.run"), Name("toolroll.sandbox.client.run_code")),
            "`SandboxFusionTool` runs programs itself, without a pool. Test cases are scored by "
            "`toolroll.rewards.code.compute_score`, see [rewards](rewards.md).",
        ),
        Row(
            "Gsm8kTool.create",
            Name("toolroll.Gsm8kTool.new_state"),
            "`create` takes `ground_truth`. One that is not a number is an infra fault.",
        ),
        Row("Gsm8kTool.execute", Name("toolroll.Gsm8kTool.execute"), "Same text and the same step reward."),
        Row("Gsm8kTool.calc_reward", Name("toolroll.Gsm8kTool.calc_reward"), "Score of the last answer."),
        Row(
            ("compute_score", "gsm8k.compute_score"),
            Name("toolroll.rewards.gsm8k.compute_score"),
            "Same arguments. Numbers are compared as numbers.",
        ),
        Row(
            "_initialize_tools",
            (Name("toolroll.Rollout"), Name("toolroll.rollout.chat.formats.load_rendering")),
            "`Rollout(tools=…)` takes tools or the path of a config.",
        ),
        Row("_handle_pending_state", Name("toolroll.rollout.instances.ToolInstances"), "Creates all tool instances."),
        Row(
            "_handle_tool_calling_state",
            Name("toolroll.rollout.tool_execution.ToolExecutor.execute_all"),
            "With a deadline for each call.",
        ),
        Row(
            "asyncio.gather",
            Name("toolroll.rollout.tool_execution.ToolExecutor.execute_all"),
            "The calls of a turn run concurrently, at most `max_parallel_calls` of them.",
        ),
        Row("add_tool_response_messages", Name(f"{REQUEST}.append_tool_responses")),
        Row(
            "calc_reward_and_release_fn",
            (Name("toolroll.rollout.tool_execution.tool_rewards"), Name("toolroll.ToolInstance")),
            "`ToolInstance` releases the instance even if `calc_reward` fails.",
        ),
        Row(
            ("ray.remote", "ray.method", "ray.get"),
            Name("toolroll.limiter.cluster.ClusterLimiter"),
            "toolroll makes the remote calls. Acquiring a slot makes none.",
        ),
    ],
    "fields": [
        Row("PENDING", Name(f"{STATE}.PENDING")),
        Row("GENERATING", Name(f"{STATE}.GENERATING")),
        Row("TOOL_CALLING", Name(f"{STATE}.TOOL_CALLING")),
        Row("FINISHED", Name(f"{STATE}.FINISHED"), "The reason is in `finish_reason`, see `toolroll.FinishReason`."),
        Row("instance_id", Name("toolroll.ToolInstance"), "Identifies the instance of one trajectory, in all turns."),
        Row("request_id", Name(f"{REQUEST}.request_id"), "Tool instances have separate ids."),
        Row("tools_kwargs", (Name(f"{REQUEST}.tools_kwargs"), Setting(PROMPT, "tools_kwargs")), "Same structure."),
        Row(("_instance_dict", "_instances"), Name("toolroll.BaseTool.state"), "State that `new_state` returned."),
        Row("execution_pool", Name("toolroll.limiter.execution.ExecutionPool"), "Created by `init_execution_pool`."),
        Row("rate_limit_worker", Name("toolroll.Limiter")),
        Row(
            ("_semaphore", "threading.Semaphore"),
            Name("toolroll.limiter.slot_queue.SlotQueue"),
            "FIFO, with deadlines.",
        ),
        Row("current_count", Name("toolroll.Limiter.in_use"), "Slots in use by this process."),
        Row(("tool_map", "_tool_map"), Name("toolroll.rollout.loop.RolloutLoop"), "Its attribute `tools`."),
        Row(
            "tool_schemas",
            Name("toolroll.BaseTool.get_openai_tool_schema"),
            "A trajectory has all tools of its rollout.",
        ),
        Row(
            ("tool_call_parser_type", "function_call_parser", "sgl_tools"),
            Setting(RUN_CONFIG, "model_format"),
            "Found by the chat template, see [models](models.md).",
        ),
        Row("processing_class", Setting(RUN_CONFIG, "model"), "`Rollout(tokenizer=…)`."),
        Row("messages", Name(f"{REQUEST}.messages")),
        Row("tool_calls", Setting("toolroll.Message", "tool_calls")),
        Row(
            "arguments", Setting("toolroll.FunctionCall", "arguments"), "Text or a dict, validated against the schema."
        ),
        Row("tool_responses", Name("toolroll.rollout.trajectory.CallRecord.answer"), "In `Trajectory.calls`."),
        Row(
            ("tool_reward", "tool_rewards"),
            (Name("toolroll.rollout.trajectory.CallRecord.reward"), Name("toolroll.Rewards.steps")),
            "By call, and summed by turn.",
        ),
        Row("reward", Name("toolroll.tools.gsm8k_tool.Gsm8kState.reward"), "Score of the last answer."),
        Row("response", Name("toolroll.tools.gsm8k_tool.Gsm8kState.response"), "Last submitted answer."),
        Row(
            ("metadata", "run_status"),
            Name("toolroll.sandbox.execution.Execution.outcome"),
            "`ok`, `failed`, `timeout`, `out_of_memory`, … In the metrics of each call.",
        ),
        Row("stdout", Name("toolroll.sandbox.execution.Execution.stdout"), "The model also reads stderr."),
        Row("code_interpreter", Name("toolroll.SandboxFusionTool.default_schema"), "Default name of the tool."),
        Row("calc_gsm8k_reward", Name("toolroll.Gsm8kTool.default_schema"), "Default name of the tool."),
        Row("my_custom_function", Setting(f"{SCHEMAS}.OpenAIFunctionSchema", "name"), "Any name."),
    ],
    "settings": [
        Row(
            "num_workers",
            Setting(SANDBOX_SETTINGS, "num_workers"),
            "Maximum number of requests in flight from one process. Default: `rate_limit`.",
        ),
        Row("rate_limit", Setting(SANDBOX_SETTINGS, "rate_limit"), "Default: 10. Holds over the whole cluster."),
        Row(
            "default_timeout",
            Setting(SANDBOX_SETTINGS, "default_timeout"),
            "Default: 30. CPU time on toolroll's sandbox.",
        ),
        Row("default_language", Setting(SANDBOX_SETTINGS, "default_language"), 'Default: `"python"`.'),
        Row(
            "enable_global_rate_limit",
            Setting(SANDBOX_SETTINGS, "enable_global_rate_limit"),
            "Default: True. With False, only `num_workers` applies.",
        ),
        Row("sandbox_fusion_url", Setting(SANDBOX_SETTINGS, "sandbox_fusion_url"), "One URL or a list."),
        Row("mode", Name("toolroll.init_execution_pool"), "Argument, a `PoolMode`."),
        Row(
            ("max_concurrency", "concurrency_group", "concurrency_groups", "get_if_exists"),
            Name(f"{BUCKET}.get_or_create_token_bucket"),
            "Options of Ray, which toolroll sets itself.",
        ),
        Row("tools", (Setting(RUN_CONFIG, "tools"), Name("toolroll.Rollout")), "Path of the tool config."),
        Row("class_name", Setting(ENTRY, "class_name"), "A class, or a function with `@tool`."),
        Row(
            ("config", "custom_param"),
            (Setting(ENTRY, "config"), Name("toolroll.ToolSettings")),
            "Settings of the tool. Unknown keys are errors if the tool declares its settings.",
        ),
        Row("tool_schema", Setting(ENTRY, "tool_schema"), "Optional if the class has a `default_schema`."),
        Row(
            "type",
            (Setting("toolroll.ToolSettings", "type"), Setting(f"{SCHEMAS}.OpenAIFunctionPropertySchema", "type")),
            "Optional in `config`.",
        ),
        Row("function", Setting("toolroll.OpenAIFunctionToolSchema", "function")),
        Row("name", Setting(f"{SCHEMAS}.OpenAIFunctionSchema", "name"), "Also `tool.name`."),
        Row("description", Setting(f"{SCHEMAS}.OpenAIFunctionSchema", "description")),
        Row("parameters", Setting(f"{SCHEMAS}.OpenAIFunctionSchema", "parameters")),
        Row("properties", Setting(f"{SCHEMAS}.OpenAIFunctionParametersSchema", "properties")),
        Row("required", Setting(f"{SCHEMAS}.OpenAIFunctionParametersSchema", "required")),
        Row("strict", Setting(f"{SCHEMAS}.OpenAIFunctionSchema", "strict"), "Reaches the prompt if it is set."),
        Row(
            "enum",
            Setting(f"{SCHEMAS}.OpenAIFunctionPropertySchema", "enum"),
            "`enum: null` is accepted, and left out of the prompt: null is not valid JSON Schema. The prompts of the "
            "original have it.",
        ),
        Row(
            "code",
            Name("toolroll.SandboxFusionTool.default_schema"),
            "The tool converts other types with `str()`, as the original did. In a rollout, the schema comes first: it "
            "rejects them with a message that the model reads, unless it declares no type for `code`.",
        ),
        Row(
            ("language", "timeout"),
            Name("toolroll.SandboxFusionTool.execute"),
            "Used if the schema has them. The timeout is at most `default_timeout`.",
        ),
        Row("answer", Name("toolroll.Gsm8kTool.default_schema"), "Other types are treated as those of `code`."),
        Row("create_kwargs", Setting(PROMPT, "tools_kwargs"), "In the dataset, by tool. Optional."),
        Row("execute_kwargs", Setting(PROMPT, "tools_kwargs"), "In the dataset, by tool. Optional."),
        Row("calc_reward_kwargs", Setting(PROMPT, "tools_kwargs"), "In the dataset, by tool. Optional."),
        Row("release_kwargs", Setting(PROMPT, "tools_kwargs"), "In the dataset, by tool. Optional."),
        Row("ground_truth", Setting(RUN_CONFIG, "data.ground_truth"), "Also in the `create_kwargs` of `Gsm8kTool`."),
        Row(
            ("method", "score", "format_score"),
            Name("toolroll.rewards.gsm8k.compute_score"),
            "Arguments, with the defaults of the original.",
        ),
        Row(
            ("actor_rollout_ref.rollout.multi_turn.tool_config_path", "config.multi_turn.tool_config_path"),
            Setting(RUN_CONFIG, "tools"),
            "Unchanged in a verl run, see [verl](verl.md).",
        ),
        Row("tool_config_path", Setting(RUN_CONFIG, "tools"), "The same setting."),
        Row(
            "multi_turn",
            (Setting(RUN_CONFIG, "limits"), Name("toolroll.Limits")),
            "[verl](verl.md#migrating-an-old-configuration) lists the keys that toolroll reads.",
        ),
        Row(
            ("trainer.rollout_data_dir", "rollout_data_dir"),
            Setting(RUN_CONFIG, "rollout_data_dir"),
            "In a verl run, toolroll's records are in its subdirectory `toolroll/`.",
        ),
        Row("max_seq_len", Setting(RUN_CONFIG, "limits.max_seq_len"), 'The trajectory ends with `"length"`.'),
        Row("tools_config_file", Name("toolroll.initialize_tools_from_config"), "Argument."),
        Row(("fn", "fn_args", "fn_kwargs"), Name("toolroll.ExecutionWorker.execute"), "Arguments."),
        Row("text", Setting("toolroll.ToolResponse", "text")),
    ],
    "files": [
        Row("verl/tools/base_tool.py", File("toolroll/tools/base_tool.py")),
        Row("verl/tools/gsm8k_tool.py", File("toolroll/tools/gsm8k_tool.py")),
        Row("verl/tools/utils/tool_registry.py", File("toolroll/tools/registry.py")),
        Row(
            "verl/workers/rollout/sglang_rollout/sglang_rollout.py",
            (File("toolroll/rollout/loop.py"), File("toolroll/rollout/rollout.py")),
            "[architecture](architecture.md) lists all modules.",
        ),
        Row("verl/utils/reward_score/gsm8k.py", File("toolroll/rewards/gsm8k.py")),
        Row(
            "examples/sglang_multiturn/config/tool_config/gsm8k_tool_config.yaml",
            File("examples/gsm8k/tool_config.yaml"),
            "The file of verl loads as well.",
        ),
        Row(
            "examples/sglang_multiturn/config/tool_config/*.yaml",
            (File("examples/sandbox_fusion/tool_config.yaml"), File("examples/verl_gsm8k/tool_config.yaml")),
            "`toolroll tools list FILE` checks a config.",
        ),
        Row(
            ("config/tool_config/my_tool_config.yaml", "path/to/my_tool_config.yaml", "path.to.MyCustomTool"),
            (File("examples/custom_tool/tool_config.yaml"), File("examples/custom_tool/bakery.py")),
        ),
        Row(
            "examples/data_preprocess/gsm8k_multiturn_w_tool.py",
            (File("examples/verl_gsm8k/prepare.py"), Command("toolroll run examples/gsm8k/run.yaml data.path=FILE")),
            "verl's preprocessing. `prepare.py` writes verl's Parquet format; `toolroll run` reads GSM8K directly.",
        ),
        Row(
            "run_qwen2.5-3b_gsm8k_multiturn.sh",
            (Command("toolroll run examples/gsm8k/run.yaml"), File("examples/gsm8k/run.yaml")),
            "Samples without a trainer. To train, use the script in the next row.",
        ),
        Row(
            "tests/special_e2e/run_gsm8k_fsdp_sgl_multiturn_sf_tool.sh",
            File("tests/special_e2e/run_gsm8k_fsdp_sgl_multiturn_sf_tool.sh"),
            "Same name. GRPO with verl on a machine with GPUs.",
        ),
        Row(
            "tests/special_e2e",
            (File("tests/special_e2e"), File("tests/special_e2e/run_gsm8k_sgl_multiturn_sf_tool.sh")),
            "The second script needs no GPU.",
        ),
        Row("verl.trainer.main_ppo", File("docs/verl.md"), "Unchanged, with toolroll's agent loop."),
        Row(
            ("python scripts/rollout_viewer.py ${trainer.rollout_data_dir}", "scripts/rollout_viewer.py"),
            (Command("toolroll view DIR"), File("scripts/rollout_viewer.py")),
            "The script still works, also with verl's dumps.",
        ),
        Row(
            ("input", "output", "step"),
            (Name(f"{RECORD}.input"), Name(f"{RECORD}.output"), Name(f"{RECORD}.step")),
            "Keys of a dump. `score` is also the same. See [records](records.md).",
        ),
    ],
    "tests": [
        Row(
            "test_tools_registration",
            Test("tests/tools/test_sandbox_fusion_tool.py", "test_tool_is_registered_by_both_names"),
        ),
        Row("test_rollout_req_creation", Test("tests/rollout/test_request.py", "test_rollout_req_creation")),
        Row("test_over_size_case", Test("tests/rollout/test_loop.py", "test_over_size_case")),
        Row("test_tool_call_basic_case", Test("tests/rollout/test_loop.py", "test_tool_call_basic_case")),
        Row("test_tool_call_batch_case", Test("tests/rollout/test_loop.py", "test_tool_call_batch_case")),
        Row("test_basic_multi_process_init", Test("tests/limiter/test_execution.py", "test_basic_multi_process_init")),
        Row("TestSingleNodeRateLimiterCase", Test("tests/limiter/test_execution.py", "TestSingleNodeRateLimiterCase")),
        Row("test_rotten_execution", Test("tests/limiter/test_execution.py", "test_rotten_execution")),
        Row(
            "TestMultiNodeRateLimiterCase",
            Test("tests/limiter/test_nodes.py", "TestMultiNodeRateLimiterCase"),
            "With two Ray nodes.",
        ),
    ],
    "texts": [
        Row(
            "Initialize tools from configuration",
            Text("toolroll.tools.registry", "Initialize tools from configuration"),
            "Level INFO, with the file and the names of the tools.",
        ),
        Row(
            "tool_reward_scores",
            (Text("toolroll.tools.instance", "tool_reward_scores"), Name("toolroll.Rewards.tools")),
            "Level DEBUG, with the tool, the instance and the reward. All rewards are in the records.",
        ),
        Row(
            ("Error when executing code", "logger.warning"),
            Name("toolroll.limiter.execution.PoolExecute"),
            "Not logged: the exception is raised in the caller. The original returned None.",
        ),
        Row(
            ("NotImplementedError", "Process mode is not implemented yet"),
            Name("toolroll.PoolMode.ProcessMode"),
            "Does not occur.",
        ),
        Row(
            "no stdout here",
            Text("toolroll.tools.transcript", "[No output.]"),
            "The model reads stdout and stderr, also after a timeout or an error.",
        ),
        Row("Current parsed", Text("toolroll.tools.gsm8k_tool", "Current parsed"), "Same text."),
        Row(
            ("####", "#### <answer>"),
            Name("toolroll.rewards.gsm8k.extract_solution"),
            'Marks the final answer, with `method="strict"`.',
        ),
        Row(
            "rate-limiter", Command("toolroll limiter status"), "Limits are named by resource, e.g. the sandbox's URL."
        ),
    ],
    "terms": [
        Row(
            "sandbox-fusion",
            (Command("toolroll sandbox serve"), Name("toolroll.SandboxClient")),
            "The server speaks the SandboxFusion protocol. SandboxFusion itself also works.",
        ),
        Row("veFaas", Setting(SANDBOX_SETTINGS, "sandbox_fusion_url"), "Any server with the SandboxFusion protocol."),
        Row("retools", Command("toolroll run examples/gsm8k/run.yaml"), "A rollout with a code interpreter."),
        Row("sglang", Name("toolroll.SGLangEngine"), "vLLM, chat servers and transformers also work."),
        Row("async-rollout", Name("toolroll.Rollout"), "All trajectories of a process share one event loop."),
        Row("cloud-pickle", Name("toolroll.ExecutionWorker"), "Ray serializes functions with it, as in the original."),
        Row("429", Name("toolroll.SandboxUnavailable"), "The client retries 429 until the deadline of the call."),
    ],
}


def table(group: str) -> str:
    """Return the table of one group."""
    lines = ["| original | toolroll | note |", "|---|---|---|"]
    for row in GROUPS[group]:
        names = ", ".join(f"`{name}`" for name in row.names)
        lines.append(f"| {names} | {'; '.join(map(str, row.references)) or '–'} | {row.note} |")
    return "\n".join([*lines, ""])


def render(page: str) -> str:
    """Return the page with current tables."""
    return TABLE.sub(lambda found: found[1] + table(found[2]) + found[3], page)


def main() -> None:
    """Update the tables in docs/migration.md."""
    PAGE.write_text(render(PAGE.read_text()))


if __name__ == "__main__":
    main()
