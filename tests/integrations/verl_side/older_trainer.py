"""The trainer that needs a row for each sample: AgentLoopManager and AgentLoopWorker."""

import json
import sys
import time
from typing import Any

import counting_tools
import ray
from scene import Scene
from verl.experimental.agent_loop import AgentLoopManager
from verl.experimental.reward_loop import RewardLoopManager


def rows_of(output: Any) -> list[dict[str, Any]]:
    """What came out, without padding."""
    batch, rows = output.batch, []
    width = batch["prompts"].shape[1]
    for place in range(len(output)):
        attention = batch["attention_mask"][place].bool()
        prompt = batch["prompts"][place][attention[:width]].tolist()
        size = int(attention[width:].sum())
        fields = {key: values[place] for key, values in output.non_tensor_batch.items()}
        rows.append(
            {
                "prompt": prompt,
                "response": batch["responses"][place][:size].tolist(),
                "mask": batch["response_mask"][place][:size].tolist(),
                "logprobs": batch["rollout_log_probs"][place][:size].tolist(),
                "beyond": int(batch["response_mask"][place][size:].sum()),
                "score": float(batch["rm_scores"][place].sum()),
                "num_turns": int(fields["__num_turns__"]),
                **{key: fields.get(key) for key in ("turn_scores", "tool_rewards", "toolroll", "min_global_steps")},
            }
        )
    return rows


def main() -> None:
    began = time.monotonic()
    spec = json.loads(sys.argv[1])
    scene = Scene(spec)
    config = scene.config(spec["sandbox"])
    rewards = RewardLoopManager(config)
    manager = AgentLoopManager.create(
        config=config, llm_client=scene.client(config), reward_loop_worker_handles=rewards.reward_loop_worker_handles
    )
    out: dict[str, Any] = {"begun": time.monotonic() - began}

    def run(name: str, places: list[int], **more: Any) -> Any:
        began = time.monotonic()
        output = manager.generate_sequences(scene.rows(config, places, **more))
        tools = ray.get([worker.__ray_call__.remote(counting_tools.told) for worker in manager.agent_loop_workers])
        took = time.monotonic() - began
        out[name] = {"rows": rows_of(output), "server": scene.told(), "tools": tools, "took": took}
        return output

    run("whole", list(range(64)))
    print(json.dumps(out))


if __name__ == "__main__":
    main()
