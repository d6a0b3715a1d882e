"""A server under thousands of hostile, careless and ordinary requests: it must be the same afterwards.

    python scripts/checks/soak_serve.py --engine hf                        # 5,000 requests to one main_serve
    python scripts/checks/soak_serve.py --engine vllm --requests 5000
    python scripts/checks/soak_serve.py --engine hf --requests 300 --control   # token ids are not checked: it must fail

The requests (soak_serve_requests.py) follow from the seed; 16 are under way at once.  Asserted: each is answered as it should be,
500 never; a half-open connection is closed in its time; greedy answers, one prompt alone at a time, are token by token those of
before the soak once the first version's weights are published again, as the newest version; the server's memory after the last
request is at most 1.10 times that after request 1,000.  Exit status 1 where anything of it is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import psutil
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from soak_serve_requests import COMPLETIONS, MODEL, WEIGHTS, Fuzzer, Sent

from tests.support.serving import Server, serving

AT_ONCE = 16
CONNECTION_S = 3.0
SLACK_S = 60.0  # on a busy machine
ANSWER_S = 180.0
GREEDY_TOKENS = 48
PROMPTS = ([5, 6, 7, 13], [8, 9, 14, 5, 6], [20], [3] * 17)
RSS_FACTOR = 1.10
WARM = 1000  # requests after which the server's memory has its size
SHOWN = 12  # problems that are printed
LENGTH = "rollout.max_model_len=400"
CONTROL = "tests.support.unchecked_ids"


@dataclass
class Soak:
    """folders: the first version's weights, and others.  answers: the greedy ones, before and after."""

    server: Server
    requests: int
    seed: int
    folders: tuple[str, str]
    problems: list[str] = field(default_factory=list)
    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    rss: dict[int, tuple[float, float]] = field(default_factory=dict)
    version: int = 0
    answers: tuple[list[Any], list[Any]] = ([], [])
    waiting: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.fuzzer = Fuzzer(self.seed, self.folders)
        host, _, port = self.server.address.removeprefix("http://").partition(":")
        self.place = (host, int(port))
        self.keys = {"client": self.server.key.encode(), "admin": self.server.admin_key.encode()}
        self.pausing = asyncio.Lock()
        self.main = psutil.Process(self.server.family[0])

    # --- the whole -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        before = await self.greedy()
        first = min(WARM, self.requests)
        marks = sorted({first, *range(0, self.requests, max(self.requests // 10, 1)), self.requests} - {0})
        done, started = 0, time.monotonic()
        for mark in marks:
            await self.send_all(range(done, mark))
            done = mark
            self.rss[mark] = self.memory()
            told = f"{done} of {self.requests} requests, {time.monotonic() - started:.0f} s, {self.rss[mark][1]:.0f} MiB"
            print(f"{told}, {len(self.problems)} problems", flush=True)
        await self.call("/admin/resume", {}, "admin")
        self.version += 1
        status, answer = await self.call(WEIGHTS, {"folder": self.folders[0], "version": self.version}, "admin")
        if status != 200:
            self.problems.append(f"the first weights cannot be published again: {status} {answer}")
        self.answers = before, await self.greedy()
        if self.answers[0] != self.answers[1]:
            self.problems.append("greedy answers are others than before")
        if self.requests > WARM:
            self.check_memory(first)

    async def send_all(self, numbers: range) -> None:
        """Ends when no connection is left."""
        left = iter(numbers)

        async def work() -> None:
            for number in left:
                await self.one(number)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        await asyncio.gather(*self.waiting)
        await asyncio.sleep(1.0)

    async def greedy(self) -> list[Any]:
        """Each prompt alone."""
        found = []
        for prompt in PROMPTS:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": GREEDY_TOKENS, "temperature": 0, "ignore_eos": True}
            status, answer = await self.call(COMPLETIONS, {**body, "return_token_ids": True}, "client")
            found.append(answer["choices"][0]["token_ids"] if status == 200 else f"{status} {answer}")
        return found

    def memory(self) -> tuple[float, float]:
        """MiB of the server's own process and of all of its."""
        family = [self.main, *self.main.children(recursive=True)]
        sizes = [process.memory_info().rss / 2**20 for process in family]
        return sizes[0], sum(sizes)

    def check_memory(self, first: int) -> None:
        for name, early, late in zip(
            ("the main process", "all processes"), self.rss[first], self.rss[self.requests], strict=True
        ):
            if late > RSS_FACTOR * early:
                grown = f"{early:.0f} MiB after {first} requests, {late:.0f} MiB after {self.requests}"
                self.problems.append(f"memory of {name} grows: {grown}, {late / early:.2f} times")

    # --- one request ---------------------------------------------------------------------------------------------------

    async def one(self, number: int) -> None:
        sent = self.fuzzer.request(number)
        if sent.manner in ("half_head", "half_body"):  # others go on meanwhile
            task = asyncio.create_task(self.judged(number, sent))
            self.waiting.add(task)
            task.add_done_callback(self.waiting.discard)
        else:
            await self.judged(number, sent)

    async def judged(self, number: int, sent: Sent) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                status, answer = await self.outcome(sent)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            status, answer = -1, f"{type(error).__name__}: {error}"
        right = status in sent.right if sent.right else status == 0
        self.statuses.setdefault(sent.kind, Counter())[str(status or "closed") if status >= 0 else "broken"] += 1
        if not right:
            shown = f"{sent.path} {sent.data[:200]!r}"
            self.problems.append(
                f"request {number} ({sent.kind}): {status} instead of {sorted(sent.right)}: {answer!s:.300} {shown}"
            )

    async def outcome(self, sent: Sent) -> tuple[int, Any]:
        """Status and answer; status 0: none, as it must be."""
        match sent.manner:
            case "half_head" | "half_body":
                return await self.half_open(sent)
            case "leave" | "leave_stream":
                return await self.leave(sent)
            case "pause":
                async with self.pausing:
                    first = await self.call("/admin/pause", {}, "admin")
                    await asyncio.sleep(0.05)
                    second = await self.call("/admin/resume", sent.body, "admin")
                return first if first[0] != 200 else second
        if sent.newest:
            self.version += 1
            sent.body["version"] = self.version
        return await self.exchange(sent)

    async def call(self, path: str, body: Any, key: str) -> tuple[int, Any]:
        return await self.exchange(Sent(kind="", right=frozenset({200}), path=path, body=body, key=key))

    def head(self, sent: Sent) -> bytes:
        key = self.keys[sent.key] if isinstance(sent.key, str) else sent.key
        lines = [f"{sent.method} {sent.path} HTTP/1.1".encode(), b"Host: soak", b"Authorization: Bearer " + key]
        lines += [b"Content-Type: application/json", f"Content-Length: {len(sent.data)}".encode(), b"Connection: close"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    async def exchange(self, sent: Sent) -> tuple[int, Any]:
        reader, writer = await asyncio.open_connection(*self.place)
        try:
            writer.write(self.head(sent) + sent.data)
            return _read(await reader.read())
        finally:
            writer.close()

    async def half_open(self, sent: Sent) -> tuple[int, Any]:
        whole = self.head(sent) + sent.data
        cut = len(self.head(sent)) // 2 if sent.manner == "half_head" else len(whole) - 3
        reader, writer = await asyncio.open_connection(*self.place)
        try:
            writer.write(whole[:cut])
            async with asyncio.timeout(CONNECTION_S + SLACK_S):
                told = await reader.read()
            return _read(told) if told else (0, "")
        finally:
            writer.close()

    async def leave(self, sent: Sent) -> tuple[int, Any]:
        """At once, or when the first tokens have come."""
        reader, writer = await asyncio.open_connection(*self.place)
        writer.write(self.head(sent) + sent.data)
        await writer.drain()
        if sent.manner == "leave_stream":
            await reader.read(400)
        writer.transport.abort()
        return 0, ""

    def report(self) -> Table:
        table = Table(title=f"{self.requests} requests, seed {self.seed}")
        for column in ("kind", "requests", "answers"):
            table.add_column(column, justify="right" if column == "requests" else "left")
        for kind, found in sorted(self.statuses.items()):
            table.add_row(kind, str(found.total()), ", ".join(f"{status}: {count}" for status, count in sorted(found.items())))
        everything = sum(self.statuses.values(), Counter())
        table.add_section()
        table.add_row("all", str(everything.total()), ", ".join(f"{key}: {value}" for key, value in sorted(everything.items())))
        return table


def _read(answer: bytes) -> tuple[int, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        raise EOFError(f"no answer: {answer[:80]!r}")
    status = int(head.split(b" ", 2)[1])
    if b"application/json" in head:
        return status, json.loads(body)
    if status == 200 and not body.rstrip(b"\r\n0").endswith(b"data: [DONE]"):
        return 500, f"a stream without an end: {body[-200:]!r}"
    return status, body[:300]


def moved_weights(model: Path, folder: Path) -> Path:
    """Another folder of this model, whose weights are others."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    save_file({name: tensor * 1.05 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    return folder


def soak(folder: Path, *, engine: str, requests: int, seed: int, control: bool = False) -> Soak:
    """Run it, on a server of its own, in `folder`."""
    settings = [f"rollout.name={engine}", LENGTH, "rollout.max_num_seqs=32", f"server.connection_s={CONNECTION_S}"]
    with serving(folder, *settings, "server.max_samples=256", plugins=[CONTROL] if control else []) as server:
        folders = (str(server.model), str(moved_weights(server.model, folder / "moved")))

        async def run() -> Soak:
            made = Soak(server=server, requests=requests, seed=seed, folders=folders)
            await made.run()
            return made

        return asyncio.run(run())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engine", choices=("hf", "vllm"), default="hf", help="rollout engine of the server (default: %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=5000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the requests (default: %(default)s)")
    parser.add_argument("--control", action="store_true", help="serve without checks of token ids: the soak must fail")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-serve-") as folder:
        found = soak(Path(folder), engine=options.engine, requests=options.requests, seed=options.seed, control=options.control)
    console = Console(width=130)
    console.print(found.report())
    for count, (own, whole) in found.rss.items():
        print(f"memory after {count} requests: {own:.0f} MiB of the main process, {whole:.0f} MiB of all")
    for prompt, *both in zip(PROMPTS, *found.answers, strict=True):
        for when, ids in zip(("before", "after"), both, strict=True):
            print(f"greedy after {prompt}, {when}: {ids}")
    for problem in found.problems[:SHOWN]:
        print(f"- {problem}")
    print(f"{len(found.problems)} problems" if found.problems else f"{options.engine}: all as it should be")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
