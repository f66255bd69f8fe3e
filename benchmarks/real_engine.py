"""Start a real SGLang or vLLM server on the CPU.

`.ci/sglang` and `.ci/vllm` install them once per machine, and a real model, SmolLM2-135M-Instruct. Scheduler, cache and
HTTP server are those of production; SGLang's kernels are those of torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from free_port import free_port

ROOT = Path(__file__).parent.parent
START_TIMEOUT_S = 300.0
"""Timeout for the server to start, which takes 25 s (SGLang) or 60 s (vLLM) on two idle cores."""
SGLANG_FLAGS = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "mem-fraction-static": "0.2",
    "max-total-tokens": "65536",
    "max-running-requests": "32",
    "context-length": "4096",
    "tool-call-parser": "qwen25",
}
VLLM_FLAGS = {"max-model-len": "4096", "max-num-seqs": "32", "limit-mm-per-prompt": '{"image": 32}'}


@dataclass
class RealEngine:
    """A running server."""

    url: str
    model_dir: Path
    """Directory of the model and its tokenizer, in the format of Hugging Face."""
    process: subprocess.Popen[bytes]
    log: Path
    start_time: float


def fastest_dtype() -> str:
    """Return the data type for this CPU. Without instructions for bfloat16, float32 is up to four times as fast."""
    return "bfloat16" if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else "float32"


def environment(name: str) -> dict[str, str]:
    """Build an environment of `.ci` unless it exists, and return the paths that its script prints."""
    output = subprocess.run([ROOT / ".ci" / name], stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in output.split())


def real_engine(
    model_dir: Path | None = None, dtype: str | None = None
) -> contextlib.AbstractContextManager[RealEngine]:
    """Run an SGLang server until the block ends.

    Args:
        model_dir: Directory of the model; by default that of SmolLM2.
        dtype: Data type of the weights; by default the fastest.
    """
    paths = environment("sglang")
    model = model_dir or Path(paths["model"])
    flags = {**SGLANG_FLAGS, "model-path": str(model), "dtype": dtype or fastest_dtype()}
    command = [paths["python"], "-m", "sglang.launch_server"]
    command += ["--disable-overlap-schedule", "--sleep-on-idle"]  # else an idle server uses a core
    return _serve(command, flags, model, {"SGLANG_USE_CPU_ENGINE": "1"})


def real_vllm(model_dir: Path, dtype: str) -> contextlib.AbstractContextManager[RealEngine]:
    """Run a vLLM server until the block ends, as `real_engine` does."""
    flags = {**VLLM_FLAGS, "model": str(model_dir), "dtype": dtype}
    command = [environment("vllm")["python"], "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--enforce-eager", "--enable-scale-out"]
    return _serve(command, flags, model_dir, {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"})


@contextlib.contextmanager
def _serve(
    command: list[str], flags: dict[str, str], model_dir: Path, variables: dict[str, str]
) -> Iterator[RealEngine]:
    port = free_port()
    flags = {**flags, "host": "127.0.0.1", "port": str(port)}
    # With setpriv, the server ends with the process that started it.
    command = ["setpriv", "--pdeathsig", "TERM", *command, *(f"--{flag}={value}" for flag, value in flags.items())]
    with tempfile.NamedTemporaryFile(prefix="engine-", suffix=".log") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables},
            start_new_session=True,
        )
        engine = RealEngine(f"http://127.0.0.1:{port}", model_dir, process, Path(log.name), 0.0)
        try:
            engine.start_time = wait_until_ready(engine)
            yield engine
        finally:
            stop(process)


def wait_until_ready(engine: RealEngine) -> float:
    """Wait until the server responds and return the duration in seconds."""
    started = time.monotonic()
    while time.monotonic() - started < START_TIMEOUT_S and engine.process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(engine.url + "/health", timeout=30):
            return time.monotonic() - started
        time.sleep(0.5)
    raise RuntimeError(f"The engine did not start. End of its log:\n{engine.log.read_text(errors='replace')[-5000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the server and its child processes."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
