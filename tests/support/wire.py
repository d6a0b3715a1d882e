"""A wire to a server that can be cut after a number of bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Wire:
    """after: for each of the next answers to a POST, how many bytes of it come through; those after are whole."""

    address: str
    after: list[int] = field(default_factory=list)


@asynccontextmanager
async def wire(address: str) -> AsyncIterator[Wire]:
    """To this server, http://host:port."""
    target = urlsplit(address)
    ends: list[asyncio.StreamWriter] = []

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(target.hostname, target.port)
        ends.extend((writer, back))
        left: list[int] = []

        async def forth() -> None:
            while data := await reader.read(1 << 16):
                if data.startswith(b"POST"):
                    left[:] = [made.after.pop(0)] if made.after else []
                back.write(data)

        sending = asyncio.create_task(forth())
        with suppress(ConnectionError):
            while data := await there.read(1 << 10):
                if left:
                    data, left[0] = data[: left[0]], left[0] - len(data)
                writer.write(data)
                await writer.drain()
                if left and left[0] <= 0:
                    break
        sending.cancel()
        writer.close()
        back.close()

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    made = Wire(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield made
    finally:
        server.close()
        for end in ends:
            end.close()
