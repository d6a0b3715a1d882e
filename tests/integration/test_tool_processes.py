"""Tools that live in processes: code that a model wrote, and an MCP server."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhub.errors import ConfigError
from rlhub.sandboxes.bwrap import usable_mode
from rlhub.tools.toolbox import Toolbox, ToolSession, load_tools
from rlhub.utils.ports import free_port
from rlhub.utils.tool_calls import ToolCall, ToolResult
from tests.support.hanging import only_hanging_calls_are_late

MCP_SERVER = '''
import sys
from mcp.server import MCPServer

server = MCPServer("test", log_level="CRITICAL")

@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no luck")

server.run(*sys.argv[1:2], **({"port": int(sys.argv[2])} if sys.argv[2:] else {}))
'''


def with_tools(use: Callable[[ToolSession], Awaitable[Any]], *entries: Any, timeout_s: float = 240.0) -> Any:
    async def run() -> Any:
        box = Toolbox(load_tools(entries, where="tools"), timeout_s=timeout_s)
        try:
            await box.aopen()
            async with box.session("episode", {}) as session:
                return await use(session)
        finally:
            await box.aclose()

    return asyncio.run(run())


def programs(*codes: str, **settings: Any) -> list[ToolResult]:
    async def use(session: ToolSession) -> list[ToolResult]:
        return list(await asyncio.gather(*(session.execute(ToolCall(name="python", arguments={"code": code})) for code in codes)))

    return with_tools(use, {"name": "python", "settings": {"timeout_s": 60.0, **settings}})  # type: ignore[no-any-return]


def test_programs_run_and_say_what_they_print() -> None:
    printed, value, error, left, odd, syntax = programs(
        "for i in range(3):\n    print(i)",
        "x = 6\nx * 7",
        "import math\nmath.sqrt(-1)",
        "import sys; sys.exit(3)",
        "import os; os._exit(5)",
        "1 +",
    )
    assert (printed.text, printed.failed) == ("0\n1\n2\n", False)
    assert (value.text, value.failed) == ("42\n", False)
    assert error.failed and "ValueError" in error.text and "python_child" not in error.text
    assert left.failed and odd.failed and "ended its process" in odd.text
    assert syntax.failed and "SyntaxError" in syntax.text


def test_a_program_leaves_nothing_behind() -> None:
    """Neither in the interpreter of the next one, nor as processes."""
    mark = f"rlhub-left-{os.getpid()}"
    spoil = "import builtins, json\nbuiltins.len = json.dumps = lambda *a, **k: 0\nx = 1"
    leave = (
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', '{mark}'])\nprint('ok')"
    )
    _, second, third = programs(spoil, "print(len([1, 2]), 'x' in dir())", leave, num_workers=1)
    assert third.text == "ok\n"
    assert second.text == "2 False\n"
    deadline = time.monotonic() + 60
    while any(mark in process.info["cmdline"] for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]):
        assert time.monotonic() < deadline, "a process that a program started is still there"
        time.sleep(0.1)


def test_programs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time, memory and output; and the tool goes on after each."""
    only_hanging_calls_are_late(monkeypatch, tmp_path / "code")
    forever = f"import os\nopen(f'{tmp_path / 'code'}.{{os.getppid()}}.hangs', 'w').close()\nwhile True: pass"
    endless, huge, talkative, odd, after = programs(
        forever,
        "x = bytearray(10**10)",
        "print('a' * 10**6)",
        "print('\\U0001f600\\x00' * 10**6)",
        "print('fine')",
        num_workers=1,
        timeout_s=4.0,
    )
    assert endless.failed and "not done after 4 s" in endless.text
    assert huge.failed and "MemoryError" in huge.text
    assert len(talkative.text) < 21_000 and "more characters" in talkative.text
    assert odd.text.startswith("\U0001f600\x00") and "more characters" in odd.text
    assert after.text == "fine\n"


@pytest.fixture
def server(tmp_path: Path) -> Path:
    pytest.importorskip("mcp")
    file = tmp_path / "server.py"
    file.write_text(MCP_SERVER)
    return file


async def use_server(session: ToolSession) -> list[Any]:
    call = ToolCall(name="x_add", arguments={"a": 2, "b": "40"})
    results = await asyncio.gather(*(session.execute(call) for _ in range(5)))
    failed = await session.execute(ToolCall(name="x_fail", arguments={}))
    return [session.schemas, [result.text for result in results], failed]


def test_an_mcp_server_over_standard_input(server: Path) -> None:
    entry = {"name": "mcp", "settings": {"command": sys.executable, "args": [str(server), "stdio"], "prefix": "x_"}}
    schemas, texts, failed = with_tools(use_server, entry)
    assert [schema["function"]["name"] for schema in schemas] == ["x_add", "x_fail"] and texts == ["42"] * 5
    assert schemas[0]["function"]["description"] == "Add two numbers."
    assert failed.failed and "fail" in failed.text
    deadline = time.monotonic() + 60
    while any(str(server) in (process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < deadline, "the server ends with the toolbox"
        time.sleep(0.05)


def test_an_mcp_server_over_http(server: Path) -> None:
    port = free_port()
    process = subprocess.Popen([sys.executable, str(server), "streamable-http", str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        entry = {"name": "mcp", "settings": {"url": f"http://127.0.0.1:{port}/mcp", "prefix": "x_", "only": ["add", "fail"]}}
        assert with_tools(use_server, entry)[1] == ["42"] * 5
    finally:
        process.kill()
        process.wait()


def test_an_mcp_server_that_cannot_be_used_is_named(server: Path) -> None:
    for settings, message in (
        ({"command": sys.executable, "args": ["-c", "raise SystemExit(1)"]}, "cannot be used"),
        ({"command": sys.executable, "args": [str(server), "stdio"], "only": ["sub"]}, "it has no sub; it has add, fail"),
        ({"url": "http://127.0.0.1:9/mcp"}, "cannot be used"),
    ):
        with pytest.raises(ValueError, match=message):
            with_tools(use_server, {"name": "mcp", "settings": settings})
    with pytest.raises(ConfigError, match="either a command or a url"):
        load_tools([{"name": "mcp"}], where="tools")


@pytest.fixture(params=["child", "bwrap"])
def place(request: pytest.FixtureRequest) -> dict[str, str]:
    """The settings with which programs run in a child process, or in a sandbox."""
    if request.param == "child":
        return {}
    try:
        usable_mode()
    except ConfigError as error:
        pytest.skip(str(error))
    return {"sandbox": "bwrap"}


def test_a_program_reads_the_users_files_without_a_sandbox_only(place: dict[str, str], tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("hf_secret")
    (found,) = programs(f"open({str(secret)!r}).read()", **place)
    assert ("hf_secret" in found.text) == (not place) and found.failed == bool(place)


def test_a_program_has_the_same_results_in_both_places(place: dict[str, str]) -> None:
    value, error, odd, big, text = programs(
        "x = 6\nx * 7",
        "import math\nmath.sqrt(-1)",
        "import os; os.write(1, b'forged'); os._exit(5)",
        "x = b'x' * (1 << 30)",
        "print('ü' + chr(0xD800))",
        memory_gb=0.25,
        **place,
    )
    assert (value.text, value.failed) == ("42\n", False)
    assert error.failed and "ValueError" in error.text and "python_program" not in error.text
    assert odd.failed and "ended its process" in odd.text
    assert big.failed and "emory" in big.text
    assert text.text == "ü\ud800\n"


def test_programs_in_a_sandbox_are_bounded(place: dict[str, str]) -> None:
    (endless,) = programs("while True: pass", timeout_s=1.0, **place)
    assert endless.failed and "not done after 1 s" in endless.text
    (named,) = programs("import os; print(sorted(os.environ))", **place)
    assert "HOME" in named.text and "PYTHONPATH" not in named.text


def test_a_sandbox_that_cannot_run_is_refused_before_the_start() -> None:
    with pytest.raises(ConfigError, match=r"settings.sandbox of the tool python=docker: docker"):
        load_tools([{"name": "python", "settings": {"sandbox": {"name": "docker", "image": "no/such:image"}}}], where="tools")
