"""A real SGLang with a real model, SmolLM2-135M-Instruct, on the CPU.

`.ci/sglang` makes both, once per machine. Its scheduler, cache and HTTP side are those of production; its kernels are
torch's. vLLM would take twice the time to install: its wire format is tested against a double of it.
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
STARTS_WITHIN = 300.0
"""Seconds; 25 on two idle cores."""
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
    """A server that runs."""

    url: str
    model_dir: Path
    """The model as Hugging Face keeps it, with its tokenizer."""
    process: subprocess.Popen[bytes]
    log: Path
    start_time: float


@contextlib.contextmanager
def real_engine(dtype: str = "bfloat16") -> Iterator[RealEngine]:
    """A server, until the block ends. With float32 it is slower, and its log-probabilities agree to 5e-5."""
    made = subprocess.run([ROOT / ".ci" / "sglang"], stdout=subprocess.PIPE, text=True, check=True).stdout
    where = dict(line.split("=", 1) for line in made.split())
    port = free_port()
    flags = {**FLAGS, "model-path": where["model"], "host": "127.0.0.1", "port": str(port), "dtype": dtype}
    # It ends with the process that started it, however that ends.
    # And gives way to others: who runs beside it may count seconds; it takes minutes in any case.
    command = ["setpriv", "--pdeathsig", "TERM", "nice", "-n", "10", where["python"], "-m", "sglang.launch_server"]
    command += ["--disable-overlap-schedule", "--sleep-on-idle"]  # else it takes a core while nobody asks for anything
    with tempfile.NamedTemporaryFile(prefix="sglang-", suffix=".log") as log:
        process = subprocess.Popen(
            [*command, *(f"--{flag}={value}" for flag, value in flags.items())],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        engine = RealEngine(f"http://127.0.0.1:{port}", Path(where["model"]), process, Path(log.name), 0.0)
        try:
            engine.start_time = wait_until_ready(engine)
            yield engine
        finally:
            stop(process)


def wait_until_ready(engine: RealEngine) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    while time.monotonic() - began < STARTS_WITHIN and engine.process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(engine.url + "/health", timeout=30):
            return time.monotonic() - began
        time.sleep(0.5)
    raise RuntimeError(f"SGLang did not start. Its last words:\n{engine.log.read_text(errors='replace')[-5000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server, and whatever it started."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
