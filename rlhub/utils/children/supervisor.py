"""The process between a driver and a child: it ends the child with everything that the child has started.

Where the machine allows it, the child lives in a PID namespace with a /proc of its own: the kernel ends all its processes when
the namespace's first one ends, and none of them sees a process outside.  Elsewhere the supervisor is the subreaper of all of
them: what a chain of forks leaves behind becomes its child, and it kills until it has none.  Code that kills its supervisor
escapes this, so the driver's log says that forks are not contained (process.py).

Only the standard library is used, because every child starts through this module.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
from collections.abc import Iterable, Iterator

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38  # linux/prctl.h
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000  # linux/sched.h
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_SLAVE = 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 19  # linux/mount.h
CAPABILITY_VERSION_3 = 0x20080522  # linux/capability.h
DRIVER_CHECK_S = 5.0
READ_BYTES = 1 << 16
NUMBER_ATTEMPTS = 20
SIGNAL_BASE = 128  # exit codes above it: ended by the signal that is left, as shells say it

_LIBC = ctypes.CDLL(None, use_errno=True)


def become_child(request_fd: int, driver_fds: Iterable[int], *, namespace: bool) -> None:
    """Returns in a new process, the child.  The calling process becomes its supervisor and does not return: it ends with the
    child's exit code once nothing of the child is left.  It ends the child when the driver sends SIGTERM or is gone.

    request_fd: the read end of a pipe to which only the driver writes.  driver_fds: descriptors that only the child may hold.
    """
    driver = os.getppid()
    set_process(PR_SET_CHILD_SUBREAPER, 1)
    owns_users = namespace and _enter_namespaces()
    set_process(PR_SET_DUMPABLE, 0)  # no other process opens its descriptors through /proc
    process = os.fork()
    if process == 0:
        set_process(PR_SET_PDEATHSIG, signal.SIGKILL)
        if namespace:
            _first_of_namespace((request_fd, *driver_fds))
        if owns_users:
            drop_capabilities()
        os.setsid()
        return
    for fd in driver_fds:
        os.close(fd)
    code = _ended(process, request_fd, driver)
    end_descendants()
    os._exit(code)


def end_descendants() -> None:
    """Kills and reaps until this process, a subreaper, has no children; the children of killed ones become its own meanwhile."""
    while True:
        for process in _children():
            _kill(process)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def set_process(option: int, value: int) -> None:
    """Calls prctl.  The options used here cannot fail on a Linux that knows them, and do not exist on other systems."""
    if sys.platform == "linux":
        _LIBC.prctl(option, value, 0, 0, 0)


def drop_capabilities() -> None:
    """Drops all capabilities; processes that this one starts cannot regain them either."""
    set_process(PR_SET_NO_NEW_PRIVS, 1)
    if sys.platform == "linux":
        header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
        _checked(_LIBC.capset(header, none))


def _ended(process: int, request_fd: int, driver: int) -> int:
    """Waits for a child process and reaps others; kills it when the driver orders its end or is gone.  Returns its exit code."""
    reader, writer = os.pipe()
    for fd in (reader, writer):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: _kill(process))
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    poller.register(request_fd, 0)  # nothing but its end: the driver alone holds the other one
    while (code := _reaped(process)) is None:
        events = dict(poller.poll(DRIVER_CHECK_S * 1000))
        if reader in events:
            os.read(reader, READ_BYTES)
        if request_fd in events or os.getppid() != driver:  # a fork of the driver may hold the pipe open
            os.kill(process, signal.SIGKILL)
            return _exit_code(os.waitpid(process, 0)[1])
    return code


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, signal.SIGKILL)


def _reaped(wanted: int) -> int | None:
    """Returns the exit code of `wanted` if it is among the processes that have ended, otherwise None."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == wanted:
                return _exit_code(found[1])
    return None


def _exit_code(status: int) -> int:
    return SIGNAL_BASE + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _children() -> Iterator[int]:
    if sys.platform != "linux":
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{thread}/children") as listed:
            yield from map(int, listed.read().split())


def _enter_namespaces() -> bool:
    """Puts the processes that this one forks into a new PID namespace.  Returns True if that needed a user namespace too.

    Raises OSError if it is forbidden. root creates no user namespace, because in its own it could no longer read other users'
    files.
    """
    user, group = os.geteuid(), os.getegid()
    owns_users = user != 0
    _checked(_LIBC.unshare(CLONE_NEWPID | (CLONE_NEWUSER if owns_users else 0)))
    if owns_users:
        for name, content in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(content)
    return owns_users


def _first_of_namespace(fds: Iterable[int]) -> None:
    """Returns in the child.  The first process of the namespace reaps and ends with the child; then the kernel ends all
    others."""
    try:
        outside = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        _checked(_LIBC.unshare(CLONE_NEWNS))
        _checked(_LIBC.mount(None, b"/", None, MS_REC | MS_SLAVE, None))
        _checked(_LIBC.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None))
        process = _fork_with_number_of(outside)
        os.close(outside)
    except OSError:
        os._exit(1)
    if process == 0:
        return
    for fd in fds:
        os.close(fd)
    while (found := os.wait())[0] != process:
        pass
    os._exit(_exit_code(found[1]))


def _fork_with_number_of(outside: int) -> int:
    """Forks a process that has the same number inside as in the /proc `outside`, by which other processes know it.  No two
    children then share a number, so files named by it do not collide.  The numbers outside are given in turn, so the next one is
    guessed."""
    reader, writer = os.pipe()
    number = int(os.readlink("self", dir_fd=outside))
    for attempt in range(NUMBER_ATTEMPTS):
        with open("/proc/sys/kernel/ns_last_pid", "w") as file:
            file.write(str(number))
        process = os.fork()
        if process == 0:
            number = int(os.readlink("self", dir_fd=outside))
            os.write(writer, b"%d" % number)
            if number != os.getpid() and attempt < NUMBER_ATTEMPTS - 1:
                os._exit(0)
            break
        number = int(os.read(reader, READ_BYTES))
        if number == process:
            break
        if attempt < NUMBER_ATTEMPTS - 1:
            os.waitpid(process, 0)
    os.close(reader)
    os.close(writer)
    return process


def _checked(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
