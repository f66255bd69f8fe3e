"""What workers say of themselves to Ray's metrics, and so to Prometheus: counts and how much is under way."""

from __future__ import annotations

from typing import Any

from toolroll.rollout.trajectory import Trajectory


class WorkerMetrics:
    """One for each worker process. Ray adds the node and the process to every number."""

    def __init__(self) -> None:
        from ray.util.metrics import Counter, Gauge

        self._trajectories: Any = Counter(
            "toolroll_trajectories", "Trajectories that ended, by why.", tag_keys=("finish_reason", "outcome")
        )
        self._tokens: Any = Counter("toolroll_sampled_tokens", "Tokens that the engine sampled.")
        self._calls: Any = Counter("toolroll_tool_calls", "Calls of tools, by whose fault.", tag_keys=("tool", "fault"))
        self._running: Any = Gauge("toolroll_trajectories_running", "Trajectories that are under way.")
        self._under_way = 0

    def begun(self) -> None:
        """A trajectory begins."""
        self._under_way += 1
        self._running.set(self._under_way)

    def ended(self, trajectory: Trajectory | None) -> None:
        """A trajectory has ended, or was given up (None)."""
        self._under_way -= 1
        self._running.set(self._under_way)
        if trajectory is None:
            return
        tags = {"finish_reason": str(trajectory.finish_reason), "outcome": trajectory.outcome}
        self._trajectories.inc(1, tags=tags)
        if sampled := sum(turn.tokens for turn in trajectory.turns):
            self._tokens.inc(sampled)
        for call in trajectory.calls:
            # A tool's name is the model's to choose where there is no such tool: it mustn't make a series of its own.
            known = str(call.tool) if call.fault is None else ""
            self._calls.inc(1, tags={"tool": known, "fault": str(call.fault or "")})
