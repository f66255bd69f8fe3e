"""The reverse proxy of examples/sandbox/nginx.conf, with a real nginx."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from free_port import free_port

from sandbox.serving import serving

pytestmark = pytest.mark.sandbox
TOKEN = "secret-of-the-test"


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Start a sandbox and the proxy before it. Yield the proxy's address and the certificate."""
    assert shutil.which("nginx"), "The test needs nginx: apt-get install nginx-light"
    directory = tmp_path_factory.mktemp("nginx")
    certificate, port = directory / "cert.pem", free_port()
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", directory / "key.pem"]
    subprocess.run([*request, "-out", certificate, *names], check=True, capture_output=True)
    config = (Path(__file__).parent.parent.parent / "examples/sandbox/nginx.conf").read_text()
    with serving(environment={"TOOLROLL_SANDBOX_TOKEN": TOKEN}) as sandbox:
        config = config.replace("127.0.0.1:8080", sandbox.url.removeprefix("http://"))
        (directory / "nginx.conf").write_text(config.replace("listen 8443", f"listen 127.0.0.1:{port}"))
        command = ["nginx", "-p", directory, "-c", "nginx.conf", "-g", "daemon off;"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE)
        for _ in range(200):
            if (directory / "nginx.pid").exists():
                break
            time.sleep(0.05)
        yield f"https://localhost:{port}", certificate
        server.terminate()
        server.communicate(timeout=10)


def run(url: str, code: str, certificate: Path | None, token: str = TOKEN) -> "subprocess.CompletedProcess[str]":
    """Run a program as a user does."""
    trust = {} if certificate is None else {"SSL_CERT_FILE": str(certificate)}
    return subprocess.run(
        [sys.executable, "-m", "toolroll", "sandbox", "run", "-", "--url", url, "--json"],
        input=code, capture_output=True, text=True, timeout=90,
        env={**os.environ, "TOOLROLL_SANDBOX_TOKEN": token, **trust},
    )  # fmt: skip


def test_programs_run_through_the_proxy(proxy: tuple[str, Path]) -> None:
    url, certificate = proxy
    result: dict[str, Any] = json.loads(run(url, "print(6 * 7)", certificate).stdout)
    assert result["stdout"] == "42\n"
    large: dict[str, Any] = json.loads(run(url, f"print(len({'x' * 5_000_000!r}))", certificate).stdout)
    assert large["stdout"] == "5000000\n", "a large body is not rejected by the proxy"


def test_other_certificate_and_wrong_token_are_rejected(proxy: tuple[str, Path]) -> None:
    url, certificate = proxy
    wrong_token = run(url, "print(1)", certificate, token="wrong")
    assert wrong_token.returncode == 2
    assert "token" in wrong_token.stderr
    untrusted = run(url, "print(1)", None)
    assert untrusted.returncode == 2
    assert "its certificate is not trusted: self-signed certificate. " in untrusted.stderr
    assert "set SSL_CERT_FILE" in untrusted.stderr
