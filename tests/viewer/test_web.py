"""The viewer in a browser, which requires the key in the URL."""

import asyncio
import json
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from free_port import free_port

from toolroll.errors import ConfigError
from toolroll.viewer.web import WebViewer
from viewer.dumps import write_toolroll_run

pytestmark = pytest.mark.viewer


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """URL that `toolroll view --web` prints."""
    port = free_port()
    runs = write_toolroll_run(tmp_path / "<b> & c", steps=[1], groups=1)
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "toolroll.cli", "view", str(runs), "--web", "--port", str(port), stdout=subprocess.PIPE
    )
    assert server.stdout is not None
    async with asyncio.timeout(60):
        line = (await server.stdout.readline()).decode().strip()
    yield line
    server.terminate()
    await server.wait()


async def test_page_requires_key_and_same_origin(url: str) -> None:
    base = url.split("/?")[0]
    port = base.rpartition(":")[2]
    assert base == f"http://127.0.0.1:{port}"
    listening = subprocess.run(["ss", "-ltnH", f"sport = :{port}"], capture_output=True, text=True).stdout
    assert f"127.0.0.1:{port}" in listening
    assert f"0.0.0.0:{port}" not in listening
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession() as stranger, aiohttp.ClientSession(cookie_jar=jar) as user:
        for path in ("/", "/?key=wrong", "/ws", "/static/js/textual.js"):
            assert (await stranger.get(base + path)).status == 403
        page = await user.get(url)
        assert page.status == 200
        assert "default-src 'self'" in page.headers["Content-Security-Policy"]
        assert "<title>&lt;b&gt; &amp; c · toolroll view</title>" in await page.text()
        assert (await user.get(f"{base}/static/js/textual.js")).status == 200
        for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
            assert (await user.get(f"{base}/ws", headers=headers)).status == 403
        moved = await user.get(url.replace("127.0.0.1", "localhost"), allow_redirects=False)
        assert (moved.status, moved.headers["Location"]) == (302, url)
        assert await _first_screen(user, base)


REFERENCE = re.compile(r"""(?:href|src)="([^"]+)"|url\(["']?([^"')]+)["']?\)|@import\s+["']([^"']+)""")
OTHER_HOST = re.compile(r"""(?:https?:|wss?:|["'(])//[\w.-]+[^\s"']*""")


async def test_page_loads_only_own_files(url: str) -> None:
    base = url.split("/?")[0]
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as user:
        page = await (await user.get(url)).text()
        assert set(OTHER_HOST.findall(page)) == {f"ws://{base.removeprefix('http://')}/ws"}
        paths = {"".join(found) for found in REFERENCE.findall(page)}
        assert {"/favicon.ico", "/static/css/xterm.css", "/static/js/textual.js"} < paths
        loaded: dict[str, str] = {}
        for path in paths:
            answer = await user.get(base + path)
            assert answer.status == 200, path
            loaded[path] = await answer.text(errors="replace")
        assert (await user.get(f"{base}/favicon.ico")).content_type == "image/svg+xml"
    assert not OTHER_HOST.findall(loaded["/static/js/textual.js"])
    assert not REFERENCE.findall(loaded["/static/css/xterm.css"])
    # The page takes the focus with names that textual-serve defines.
    assert '".xterm-helper-textarea").focus()' in page
    for name in ("-first-byte", "-closed", "xterm-helper-textarea"):
        assert name in page
        assert name in loaded["/static/js/textual.js"]


async def _first_screen(user: aiohttp.ClientSession, base: str) -> bool:
    """Return True if the page shows the samples and quits on q."""
    seen = b""
    async with user.ws_connect(f"{base}/ws?width=100&height=30") as page, asyncio.timeout(60):
        async for message in page:
            seen += message.data if message.type is aiohttp.WSMsgType.BINARY else b""
            if b"sample 1 of 4" in seen:
                await page.send_str(json.dumps(["stdin", "q"]))
                break
        async for _ in page:
            pass
    return b"sample 1 of 4" in seen


def test_used_port_is_reported(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        viewer = WebViewer(["true"], "title", taken.getsockname()[1], lambda _: None)
        with pytest.raises(ConfigError, match="Choose another port with --port"):
            viewer.run()
