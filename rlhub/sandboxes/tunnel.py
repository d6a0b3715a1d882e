"""One address of this machine, reachable from a sandbox that otherwise has no network: the endpoint of an agent, for example.

Inside, a program listens on the loopback interface of the sandbox's own network and passes each connection on through a socket in
the sandbox's folder, from where this process passes it on to the address.  Nothing else can be reached through it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from rlhub.sandboxes.base import WORKSPACE, Address

SOCKET = ".tunnel"
CHUNK = 1 << 16
INSIDE = """
import os, socket, sys, threading
port, path, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
server = socket.create_server(("127.0.0.1", port), backlog=128)
def pump(source, sink):
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass
def serve(client):
    with client, socket.socket(socket.AF_UNIX) as host:
        host.connect(path)
        up = threading.Thread(target=pump, args=(client, host), daemon=True)
        up.start()
        pump(host, client)
        up.join()
if os.fork() == 0:
    for fd in range(3):
        os.close(fd)
    while True:
        threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
os.set_inheritable(server.fileno(), False)
try:
    os.execvp(command[0], command)
except OSError as error:
    sys.exit(f"{command[0]}: {error.strerror}")
"""
"""The program inside: it listens before it becomes the command, so that no connection comes too early."""


@asynccontextmanager
async def tunnel(address: Address | None, folder: Path, python: str) -> AsyncIterator[Sequence[str]]:
    """Passes connections on while the context lasts; yields the words to put before the command.  address: what can be reached,
    inside as 127.0.0.1 with the same port; None: nothing.  folder: WORKSPACE on the host.  python: an interpreter inside."""
    if address is None:
        yield ()
        return
    host, port = address

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(host, port)
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
            far_writer.close()
        writer.close()

    path = folder / SOCKET
    path.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(connected, path=path)
    path.chmod(0o666)  # the command may have another user's id; the folder above is this user's alone
    try:
        yield (python, "-I", "-S", "-c", INSIDE, str(port), f"{WORKSPACE}/{SOCKET}")
    finally:
        server.close()
        path.unlink(missing_ok=True)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(CHUNK):
            sink.write(data)
            await sink.drain()
        sink.write_eof()
