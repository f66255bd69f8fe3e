"""Start a real SGLang server with a real model, SmolLM2-135M-Instruct, on the CPU.

`.ci/sglang` installs both once per machine. Scheduler, cache and HTTP server are those of production; the kernels are
those of torch. vLLM takes twice as long to install, so its wire format is tested against a fake server.
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
"""Timeout for the server to start, which takes 25 s on two idle cores."""
FLAGS = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "mem-fraction-static": "0.2",
    "max-total-tokens": "65536",
    "max-running-requests": "32",
    "context-length": "4096",
    "tool-call-parser": "qwen25",
}


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


@contextlib.contextmanager
def real_engine() -> Iterator[RealEngine]:
    """Run a server until the block ends."""
    output = subprocess.run([ROOT / ".ci" / "sglang"], stdout=subprocess.PIPE, text=True, check=True).stdout
    paths = dict(line.split("=", 1) for line in output.split())
    port = free_port()
    flags = {**FLAGS, "model-path": paths["model"], "host": "127.0.0.1", "port": str(port)}
    flags["dtype"] = fastest_dtype()
    # With setpriv, the server ends with the process that started it.
    command = ["setpriv", "--pdeathsig", "TERM", paths["python"], "-m", "sglang.launch_server"]
    command += ["--disable-overlap-schedule", "--sleep-on-idle"]  # else an idle server uses a core
    with tempfile.NamedTemporaryFile(prefix="sglang-", suffix=".log") as log:
        process = subprocess.Popen(
            [*command, *(f"--{flag}={value}" for flag, value in flags.items())],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        engine = RealEngine(f"http://127.0.0.1:{port}", Path(paths["model"]), process, Path(log.name), 0.0)
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
    raise RuntimeError(f"SGLang did not start. End of its log:\n{engine.log.read_text(errors='replace')[-5000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the server and its child processes."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
