"""Attacks on a sandbox of bubblewrap, each with its control: the same attack as a plain process succeeds.

Every attack runs in both modes, root's and that of a user namespace, and with the bounds of cgroups and without.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from rlhub.errors import ConfigError
from rlhub.sandboxes import bwrap
from rlhub.sandboxes.base import ExecResult, Given, Sandbox, SandboxError, SandboxLimits
from rlhub.sandboxes.bwrap import BwrapProvider, BwrapSandbox, Mode, _modes, _refusal, usable_mode
from rlhub.sandboxes.workspace import remove_left

try:
    usable_mode()
    MODES: list[Mode] = [mode for mode in _modes() if not _refusal(mode)]
except ConfigError as error:
    pytest.skip(f"no sandbox can be made here: {error}", allow_module_level=True)

PYTHON = os.path.realpath(sys.executable)
LIMITS = SandboxLimits(timeout_s=100.0, memory_gb=0.25, processes=32, output_bytes=1 << 16, disk_mb=8)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    return request.param


Run = Callable[..., ExecResult]


@pytest.fixture
def run(mode: Mode) -> Run:
    """Runs one Python program in a new sandbox."""

    def call(code: str, *, timeout_s: float | None = None, provider: BwrapProvider | None = None) -> ExecResult:
        return run_in(mode, [PYTHON, "-I", "-S", "-c", code], timeout_s=timeout_s, provider=provider)

    return call


def run_in(
    mode: Mode, command: Sequence[str], *, timeout_s: float | None = None, provider: BwrapProvider | None = None
) -> ExecResult:
    async def once() -> ExecResult:
        async with BwrapSandbox(provider or BwrapProvider(limits=LIMITS), mode) as sandbox:
            return await sandbox.exec(command, given=Given(timeout_s=timeout_s))

    return asyncio.run(once())


def plain(code: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    """Runs the program as a process of its own, without a sandbox."""
    return subprocess.run([PYTHON, "-I", "-S", "-c", code], capture_output=True, timeout=60, check=False, **options)  # type: ignore[call-overload, no-any-return]


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_network_is_off(run: Run, listener: int) -> None:
    attack = f"import socket; socket.create_connection(('127.0.0.1', {listener}), 5); print('in')"
    assert plain(attack).stdout == b"in\n"
    assert b"ConnectionRefused" in run(attack).stderr
    found = run("import socket; print(socket.if_nameindex())")
    assert found.stdout == b"[(1, 'lo')]\n"


def test_abstract_sockets_of_the_host_are_out_of_reach(run: Run) -> None:
    name = f"\\0rlhub-test-{os.getpid()}"
    attack = f"import socket; socket.socket(socket.AF_UNIX).connect('{name}'); print('in')"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name.replace("\\0", "\0"))
        server.listen()
        assert plain(attack).stdout == b"in\n"
        assert b"ConnectionRefused" in run(attack).stderr


def test_files_of_the_host_are_not_seen(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("token")
    for path in (str(secret), "/etc/passwd", "/etc/shadow", os.path.expanduser("~/.bashrc"), f"{Path(__file__).resolve()}"):
        attack = f"print(len(open({path!r}).read()))"
        if os.access(path, os.R_OK):
            assert plain(attack).returncode == 0
        assert b"FileNotFoundError" in run(attack).stderr


def test_nothing_outside_is_written(run: Run, tmp_path: Path) -> None:
    attack = f"open({str(tmp_path / 'x')!r}, 'w')"
    assert plain(attack).returncode == 0 and (tmp_path / "x").exists()
    (tmp_path / "x").unlink()
    assert run(attack).code == 1 and not (tmp_path / "x").exists()
    for folder in ("/", "/usr", "/usr/local/lib", "/dev", "/etc", os.path.dirname(os.path.dirname(PYTHON)), "/proc/sys/kernel"):
        found = run(f"import os\ntry: open({folder!r} + '/x', 'w')\nexcept OSError: print('no')")
        assert found.stdout == b"no\n", folder


def test_processes_of_the_host_are_not_seen(run: Run) -> None:
    attack = f"import os; os.kill({os.getpid()}, 0); print(open('/proc/{os.getpid()}/cmdline').read() != '')"
    assert plain(attack).stdout == b"True\n"
    assert run(attack).code == 1
    listed = run("import os; print(sorted(name for name in os.listdir('/proc') if name.isdigit()))").stdout
    assert len(eval(listed)) <= 3


def test_the_environment_is_empty_but_for_what_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-value")
    monkeypatch.setenv("NAMED", "shown")
    attack = "import os; print(sorted(os.environ)); print(open('/proc/self/environ').read())"
    assert b"secret-value" in plain(attack).stdout
    found = run(attack, provider=BwrapProvider(limits=LIMITS, env=["NAMED"])).stdout
    assert b"secret-value" not in found and b"NAMED=shown" in found
    assert found.startswith(b"['HOME', 'LANG', 'NAMED', 'PATH', 'PWD', 'TMPDIR']")


@pytest.fixture(params=["cgroup", "rlimits"])
def bounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the kernel bounds a command as a whole."""
    if request.param == "rlimits":
        monkeypatch.setattr(bwrap, "cgroup_parents", lambda: None)
    elif bwrap.cgroup_parents() is None:
        pytest.skip("cgroups cannot be written here")
    return str(request.param)


def test_memory_of_one_process(run: Run, bounds: str) -> None:
    attack = "x = b'x' * (1 << 29); print('grabbed')"
    assert plain(attack).stdout == b"grabbed\n"
    found = run(attack)
    assert found.stdout == b""
    assert found.ended == "memory" or b"MemoryError" in found.stderr


def test_memory_of_many_processes(run: Run, bounds: str) -> None:
    found = run("import os, time\nfor _ in range(5): os.fork()\nx = b'x' * (100 << 20); time.sleep(20)")
    assert found.ended == "memory" and found.seconds < LIMITS.timeout_s


def test_sleep_ends_at_the_time_limit(mode: Mode) -> None:
    found = run_in(mode, ["sh", "-c", "echo on; sleep 1000"], timeout_s=6.0)
    assert (found.ended, found.stdout, found.code) == ("time", b"on\n", 137) and found.seconds < 100


BOMB = "import os\nwhile True:\n    try: os.fork() or os.write(1, b'x')\n    except OSError: pass"


def test_fork_bomb_ends(mode: Mode, run: Run, bounds: str) -> None:
    if mode == "user" and os.geteuid() == 0 and bounds == "rlimits":
        pytest.skip("RLIMIT_NPROC does not bind root in a user namespace; root's own mode and cgroups do")
    most = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal most
        while not stop.wait(0.05):
            most = max(most, len(descendants()))

    before, counting = len(descendants()), threading.Thread(target=count)
    counting.start()
    found = run(BOMB, timeout_s=4.0)
    stop.set()
    counting.join()
    assert found.ended in ("time", "memory")
    assert most - before <= LIMITS.processes + 8
    assert found.stdout, "it was to fork: each process that it made has written"
    assert until(lambda: len(descendants()) <= before)


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


DAEMON = """
import os, sys
reader, writer = os.pipe()  # closed by the daemon's exec
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in (0, 1, 2): os.close(fd)
        os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(600)", "MARK"])
    os._exit(0)
os.close(writer)
os.wait()
os.read(reader, 1)
"""


def test_a_daemon_ends_with_the_command(run: Run) -> None:
    mark = f"rlhub-daemon-{os.getpid()}-{time.monotonic_ns()}"

    def alive() -> list[psutil.Process]:
        return [process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or [])]

    plain(DAEMON.replace("MARK", mark))
    assert len(alive()) == 1
    alive()[0].kill()
    assert until(lambda: not alive())
    assert run(DAEMON.replace("MARK", mark)).code == 0
    assert until(lambda: not alive()), "what is killed ends when it gets a core"


def test_output_is_bounded(run: Run) -> None:
    attack = "import os\nfor _ in range(100): os.write(1, b'x' * (1 << 16))"
    assert len(plain(attack).stdout) == 100 << 16
    found = run("import os\nwhile True: os.write(1, b'x' * (1 << 16))")
    assert found.ended == "output" and len(found.stdout) == LIMITS.output_bytes and found.seconds < LIMITS.timeout_s


def test_disk_is_bounded(run: Run) -> None:
    hole = run("open('x', 'wb').truncate(9 << 20)")  # takes no space: the bound on each file alone
    assert (hole.code, hole.ended) == (1, "") and b"File too large" in hole.stderr
    one = run("open('x', 'wb').write(b'x' * (9 << 20))")  # both bounds: whichever sees it first
    assert one.ended == "disk" or (one.code == 1 and b"File too large" in one.stderr)
    many = run("n = 0\nwhile True:\n    n += 1\n    open(f'/tmp/{n}', 'wb').write(b'x' * (1 << 20))")
    assert many.ended == "disk"
    empty = run("n = 0\nwhile True:\n    n += 1\n    open(f'{n}', 'wb')")
    assert empty.ended == "disk"


def test_no_right_is_gained(run: Run) -> None:
    found = run("print([line for line in open('/proc/self/status') if line.startswith(('Cap', 'NoNew'))])")
    rights = dict(line.split(":\t") for line in eval(found.stdout))
    assert int(rights["NoNewPrivs"]) == 1
    assert int(rights["CapEff"], 16) == int(rights["CapPrm"], 16) == int(rights["CapInh"], 16) == 0
    assert run("import os; print(os.listdir('/proc/self/fd'))").stdout.count(b"'") == 8  # 0 to 2, and that of the listing


def in_sandbox(mode: Mode, steps: Callable[[Sandbox], object]) -> None:
    async def once() -> None:
        async with BwrapSandbox(BwrapProvider(limits=LIMITS), mode) as sandbox:
            await steps(sandbox)  # type: ignore[misc]

    asyncio.run(once())


def test_files_stay_until_the_sandbox_is_closed(mode: Mode) -> None:
    folders: list[Path] = []

    async def steps(sandbox: Sandbox) -> None:
        assert isinstance(sandbox, BwrapSandbox)
        folders.append(sandbox._files.work)
        await sandbox.write("a/b.txt", b"hello")
        found = await sandbox.exec(["sh", "-c", "cat; cat a/b.txt; echo there > a/c; mkdir -p d/e; chmod 0 d"], stdin=b"in ")
        assert found.stdout == b"in hello"
        assert await sandbox.read("/workspace/a/c") == b"there\n"
        with pytest.raises(SandboxError, match="No such file"):
            await sandbox.read("missing")

    in_sandbox(mode, steps)
    assert not folders[0].parent.exists()


@pytest.mark.parametrize("link", ["ln -s {0}/secret x", "ln -s {0} x"])
def test_the_host_follows_no_link(mode: Mode, tmp_path: Path, link: str) -> None:
    (tmp_path / "secret").write_text("token")
    path = "x" if "secret x" in link else "x/secret"

    async def steps(sandbox: Sandbox) -> None:
        assert isinstance(sandbox, BwrapSandbox)
        assert (await sandbox.exec(["sh", "-c", link.format(tmp_path)])).code == 0
        assert (sandbox._files.work / path).read_text() == "token"  # the control: an open that follows
        with pytest.raises(SandboxError):
            await sandbox.read(path)
        with pytest.raises(SandboxError):
            await sandbox.write(path, b"changed")

    in_sandbox(mode, steps)
    assert (tmp_path / "secret").read_text() == "token"


@pytest.mark.parametrize("make", ["mkfifo x", "mkdir x", "ln -s /dev/zero x"])
def test_the_host_reads_regular_files_only(mode: Mode, make: str) -> None:
    async def steps(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["sh", "-c", make])).code == 0
        for _ in range(2):
            with pytest.raises(SandboxError):
                await sandbox.read("x")
        with pytest.raises(SandboxError):
            await sandbox.write("x", b"data")

    in_sandbox(mode, steps)


def test_a_cancelled_command_ends(mode: Mode) -> None:
    seconds = f"{1000 + os.getpid()}.{time.monotonic_ns()}"

    def commands() -> list[list[str]]:
        """Of bwrap, of what starts it and of what it runs."""
        found = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
        return [command for command in found if seconds in command]

    async def steps(sandbox: Sandbox) -> None:
        task = asyncio.create_task(sandbox.exec(["sleep", seconds]))
        end = time.monotonic() + 60
        while ["sleep", seconds] not in commands():
            assert time.monotonic() < end and not task.done()
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert until(lambda: not commands())

    in_sandbox(mode, steps)


def test_a_sandbox_ends_with_the_process_that_opened_it(mode: Mode) -> None:
    mark = f"rlhub-orphan-{os.getpid()}-{time.monotonic_ns()}"
    program = f"""
import asyncio
from rlhub.sandboxes.bwrap import BwrapProvider, BwrapSandbox
from rlhub.sandboxes.workspace import remove_left
async def main():
    sandbox = BwrapSandbox(BwrapProvider(), {mode!r})
    print(sandbox._files.name, flush=True)
    await sandbox.exec(["sh", "-c", "sleep 100; : {mark}"])
asyncio.run(main())
"""

    def inside() -> list[list[str]]:
        commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        return [command for command in commands if command[:2] == ["sh", "-c"] and mark in command[2]]

    folders, folder = Path(tempfile.gettempdir()), ""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        folder = driver.stdout.readline().strip()
        assert until(lambda: bool(inside()))
        remove_left(bwrap.KIND, bwrap.remove_own_groups)
        assert inside() and (folders / folder).is_dir() and (groups(folder) or bwrap.cgroup_parents() is None)
        driver.kill()
    assert until(lambda: not inside())

    def nothing_left() -> bool:
        remove_left(bwrap.KIND, bwrap.remove_own_groups)
        return not (folders / folder).exists() and not groups(folder)

    assert until(nothing_left)


def groups(name: str) -> list[Path]:
    parents = bwrap.cgroup_parents()
    return [] if parents is None else [group for parent in parents.folders for group in parent.glob(f"{name}-*")]


def test_a_sandbox_ends_though_its_opener_is_killed_while_it_starts(mode: Mode) -> None:
    mark = f"rlhub-start-{os.getpid()}-{time.monotonic_ns()}"
    program = f"""
import asyncio
from rlhub.sandboxes import bwrap
from rlhub.sandboxes.base import SandboxLimits
bwrap.END_S = 1.0
bwrap.cgroup_parents()
async def main():
    sandbox = bwrap.BwrapSandbox(bwrap.BwrapProvider(limits=SandboxLimits(timeout_s=2.0)), {mode!r})
    print("ready", flush=True)
    await sandbox.exec(["sh", "-c", "sleep 100; : {mark}"])
asyncio.run(main())
"""
    for moment in range(12):
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as driver:
            assert driver.stdout is not None and driver.stdout.readline() == b"ready\n"
            time.sleep(0.002 * moment)
            driver.kill()
    assert until(lambda: not any(mark in str(process.info["cmdline"]) for process in psutil.process_iter(["cmdline"])))


STARTING = """
import asyncio, sys
from rlhub.sandboxes import bwrap
class Stuck(bwrap.BwrapSandbox):
    def _launcher(self, command, seconds, group, status, env):
        return super()._launcher(command, seconds, group, {full}, env)
async def main():
    sandbox = Stuck(bwrap.BwrapProvider(limits=bwrap.SandboxLimits(timeout_s=120.0)), {mode!r})
    running = asyncio.create_task(sandbox.exec(["sh", "-c", "sleep 100; : {mark}"]))
    running.add_done_callback(print)
    await asyncio.to_thread(sys.stdin.readline)
    running.cancel()
    await asyncio.wait([running])
asyncio.run(main())
"""


@pytest.fixture
def full() -> Iterator[int]:
    """A pipe that takes no more: bwrap has made the namespace's first process, which waits for it, and stops at saying so."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x")
    os.set_blocking(writer, True)
    yield writer
    os.close(reader)
    os.close(writer)


def starting(mark: str) -> list[psutil.Process]:
    """Returns bwrap and the process that it has made."""
    found = psutil.process_iter(["name", "cmdline"])
    return [process for process in found if process.info["name"] == "bwrap" and mark in str(process.info["cmdline"])]


def seen(mark: str) -> list[tuple[int | None, str | None, str | None]]:
    """Returns parent, name and state of every process of the call, for a message."""
    found = psutil.process_iter(["ppid", "name", "status", "cmdline"])
    return [
        (process.info["ppid"], process.info["name"], process.info["status"])
        for process in found
        if mark in str(process.info["cmdline"])
    ]


def test_what_bwrap_is_starting_ends_with_the_process_that_opened_it(mode: Mode, full: int) -> None:
    mark = f"rlhub-stuck-{os.getpid()}-{time.monotonic_ns()}"
    program = STARTING.format(full=full, mode=mode, mark=mark)
    with subprocess.Popen([sys.executable, "-c", program], pass_fds=[full], stdin=subprocess.PIPE) as driver:
        assert until(lambda: len(starting(mark)) == 2), seen(mark)
        driver.kill()
    assert until(lambda: not starting(mark))


def test_what_bwrap_was_starting_when_something_else_killed_it_ends_with_the_call(mode: Mode, full: int) -> None:
    mark = f"rlhub-killed-{os.getpid()}-{time.monotonic_ns()}"
    program = STARTING.format(full=full, mode=mode, mark=mark)
    with subprocess.Popen([sys.executable, "-c", program], pass_fds=[full], stdin=subprocess.PIPE, text=True) as driver:
        assert until(lambda: len(starting(mark)) == 2), seen(mark)
        found = starting(mark)
        (outer,) = [process for process in found if process.ppid() not in [other.pid for other in found]]
        outer.kill()
        assert until(lambda: len(starting(mark)) == 1), "the control: what it was starting stays"
        driver.communicate("end\n", timeout=60)
    assert driver.returncode == 0 and until(lambda: not starting(mark))


def test_a_command_that_does_not_exist_is_a_result(mode: Mode) -> None:
    found = run_in(mode, ["no-such-program"])
    assert found.code == 127 and b"no-such-program" in found.stderr
    with pytest.raises(SandboxError, match="cannot be started"):
        run_in(mode, ["echo", "a\0b"])


def test_exit_codes_and_both_outputs(mode: Mode) -> None:
    found = run_in(mode, ["sh", "-c", "echo out; echo err >&2; exit 7"])
    assert (found.code, found.stdout, found.stderr, found.ended) == (7, b"out\n", b"err\n", "")
    assert run_in(mode, ["sh", "-c", "kill -SEGV $$"]).code == 128 + 11


def test_a_user_who_is_not_root_has_the_same_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a user namespace of a real unprivileged user, which a test that runs as root enters as one."""
    if os.geteuid() != 0:
        pytest.skip("the other tests run as a user who is not root")
    monkeypatch.setattr(bwrap, "_python_folders", list)  # root's home is closed to others
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        folders = [f"{folder}/work", f"{folder}/tmp"]
        for path in folders:
            os.mkdir(path)
            os.chown(path, NOBODY, NOBODY)
        argv = [
            *bwrap.bwrap_arguments("user", BwrapProvider(), folders),
            *("--", *bwrap.inner_arguments(LIMITS, None, total_memory=False), "--", "sh", "-c"),
        ]

        def as_nobody(script: str) -> subprocess.CompletedProcess[str]:
            ids = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
            return subprocess.run([*argv, script], capture_output=True, text=True, timeout=60, check=False, env={}, **ids)  # type: ignore[call-overload, no-any-return]

        if (first := as_nobody("echo in > file; cat file")).stdout != "in\n":
            pytest.skip(f"user namespaces are refused to users who are not root: {first.stderr}")
        assert "fork" in as_nobody("for i in $(seq 100); do sleep 30 & done").stderr
        assert as_nobody("head -c 600000000 /dev/zero | tail -c 500000000 | wc -c").stdout == "0\n"
        assert as_nobody("tail -n +3 /proc/net/dev | wc -l").stdout == "1\n"
        assert as_nobody("echo x > /usr/x").returncode != 0 and as_nobody("cat /etc/passwd").returncode != 0


NOBODY = 65534


CONNECT = """
import socket
for port in ({}, {}):
    try:
        socket.create_connection(("127.0.0.1", port), 60)
        print("in")
    except OSError:
        print("no")
"""


def test_a_tunnel_leads_to_one_address(mode: Mode, listener: int) -> None:
    """The control is the same command that is given no address."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        far = other.getsockname()[1]
        command = [PYTHON, "-I", "-S", "-c", CONNECT.format(listener, far)]

        async def steps(sandbox: Sandbox) -> None:
            assert (await sandbox.exec(command)).stdout == b"no\nno\n"
            assert (await sandbox.exec(command, given=Given(reach=("127.0.0.1", listener)))).stdout == b"in\nno\n"
            assert (await sandbox.exec(command)).stdout == b"no\nno\n"
            assert (await sandbox.exec(["no-such"], given=Given(reach=("127.0.0.1", listener)))).code == 1

        in_sandbox(mode, steps)


def test_bytes_pass_a_tunnel_in_both_directions(mode: Mode) -> None:
    program = (
        "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.sendall(b'x' * 300000); "
        "s.shutdown(1); n = 0\nwhile data := s.recv(65536): n += len(data)\nprint(n)"
    )

    async def steps(sandbox: Sandbox) -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.read() * 2)
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()[:2]
        command = [PYTHON, "-I", "-S", "-c", program, str(address[1])]
        found = await asyncio.gather(*(sandbox.exec(command, given=Given(reach=address)) for _ in range(2)))
        assert [result.stdout for result in found] == [b"600000\n"] * 2
        server.close()

    in_sandbox(mode, steps)


def test_values_of_variables_are_not_in_a_command_line(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMED", "secret-value")
    sandbox = BwrapSandbox(BwrapProvider(env=["NAMED"]), mode)
    launcher = sandbox._launcher(["true"], 1.0, None, 3, {"GIVEN": "secret-value"})
    assert launcher.env["NAMED"] == launcher.env["GIVEN"] == "secret-value"
    assert not any("secret-value" in word for word in launcher.argv)
    asyncio.run(sandbox.aclose())
