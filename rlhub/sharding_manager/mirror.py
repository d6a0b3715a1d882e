"""Versions that travel: each training rank serves its own part from its machine's memory, and each replica mirrors all parts.

A replica asks every rank for the files of a version that it lacks, and gets them over a connection of the two processes alone,
a new one for each version: by NCCL between two GPUs, through which the bytes pass in chunks, and otherwise by gloo.  A rank and
a replica on one GPU, which NCCL refuses, share a machine, so the replica links the files.  So replicas may join late, and one
that dies or hangs costs a thread of the rank, which ends with its deadline; training does not wait for any.  In the mirror a
version is read as in any folder: mapped, compared, with deltas.

    rank:     WeightWriter -> folder in memory -> VersionServer
    replica:  Mirror.fetch -> folder in memory -> WeightReader

A request must have the token of the address, which only the run's own processes get.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhub.errors import DeadlineError, EngineError, RlhubError
from rlhub.sharding_manager.files import new_in_memory
from rlhub.sharding_manager.peers import Peers
from rlhub.sharding_manager.versions import FULL, MANIFEST, WANTED, ask_for_full, chain_start, version_folder, versions_in
from rlhub.utils.atomic import TEMPORARY_SUFFIX
from rlhub.utils.ports import free_port

logger = logging.getLogger(__name__)
COLLECTIVE = "collective"
"""The name that stands for a folder where every rank writes into one of its own."""
SCHEME = "tcp://"
POLL_S = 0.05
CPU = torch.device("cpu")
GLOO, NCCL, LINK = "gloo", "nccl", "link"
CHUNK_BYTES = 64 << 20
"""The most bytes that travel at once, which on a GPU take as much of its memory."""
DTYPES = "dtypes-*.json"


@dataclass(slots=True, kw_only=True, frozen=True)
class _Request:
    """The request of a mirror to a rank.

    have: versions that it has.  full: only the version itself, every block in full.  dtypes: the contents of the files in which
    the replica's engine names its dtypes, by their names.  device: the replica's (see device_identity).
    """

    token: str
    version: int
    have: list[int]
    full: bool
    dtypes: dict[str, str]
    device: str = ""


def device_identity(device: torch.device) -> str:
    """Returns a name that no other GPU has, or "" for a CPU and where torch has no NCCL."""
    usable = device.type == "cuda" and dist.is_nccl_available()
    return str(torch.cuda.get_device_properties(device).uuid) if usable else ""


def carrier(rank: str, replica: str) -> str:
    """Returns how files go from a rank to a replica, by their device_identity: gloo, nccl or link."""
    if not rank or not replica:
        return GLOO
    return LINK if rank == replica else NCCL


class VersionServer:
    """Serves the versions in the folder of one training rank.

    host: this machine's address for the replicas.  device: the rank's.
    """

    def __init__(self, folder: Path, *, host: str, rank: int, timeout_s: float, device: torch.device = CPU) -> None:
        self._folder, self._host, self._rank, self._timeout_s = folder, host, rank, timeout_s
        self._device = device
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server(("", 0))
        threading.Thread(target=self._accept, name="versions", daemon=True).start()

    @property
    def address(self) -> str:
        """Returns where mirrors ask."""
        return f"{SCHEME}{self._host}:{self._listener.getsockname()[1]}/{self._token}"

    def close(self) -> None:
        """Stops to accept connections.  Idempotent."""
        with _ignored():
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), name="version", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Serves one request.  Whatever happens to it is this connection's matter only."""
        with connection:
            try:
                connection.settimeout(self._timeout_s)
                lines = connection.makefile("rwb")
                request = _Request(**json.loads(lines.readline()))
                if not secrets.compare_digest(request.token, self._token):
                    return
                self._note(request.dtypes)
                files = self._files(request)
                how, port = carrier(device_identity(self._device), request.device), free_port()
                sizes = [[name, path.stat().st_size] for name, path in files]
                _send_line(lines, {"files": sizes, "port": port, "carrier": how, "folder": str(self._folder)})
                if how != LINK:
                    device = self._device if how == NCCL else CPU
                    _send([path for _, path in files], Peer(self._host, port, device, self._timeout_s))
            except (RlhubError, OSError, ValueError, TypeError, RuntimeError) as error:
                logger.warning("a replica did not get its weights from rank %d: %s", self._rank, error)

    def _note(self, dtypes: dict[str, str]) -> None:
        for name, text in dtypes.items():
            if Path(name).match(DTYPES) and not (self._folder / Path(name).name).exists():
                (self._folder / Path(name).name).write_text(text)

    def _files(self, request: _Request) -> list[tuple[str, Path]]:
        """Returns the files to send, by their names in the mirror."""
        version, folder = request.version, version_folder(self._folder, request.version)
        if request.full:
            ask_for_full(folder)
            _wait(lambda: (folder / f"{FULL}rank-{self._rank}.json").exists(), f"version {version} in full", self._timeout_s)
            versions, wanted = [version], f"{FULL}rank-"
        else:
            _wait(lambda: (folder / MANIFEST).exists(), f"version {version}", self._timeout_s)
            start = chain_start(self._folder, version)
            versions = [number for number in versions_in(self._folder) if start <= number <= version]
            versions, wanted = [number for number in versions if number == version or number not in request.have], ""
        paths = [path for number in versions for path in sorted(version_folder(self._folder, number).iterdir())]
        return [
            (f"{path.parent.name}/{path.name}", path)
            for path in paths
            if path.name.startswith(wanted) and path.name != WANTED and not path.name.endswith(TEMPORARY_SUFFIX)
        ]


class Mirror:
    """The versions of all ranks in this process's own folder in memory.

    addresses: those of all ranks, separated by commas.  device: the replica's.  Only one thread may call its methods at a time.
    """

    def __init__(self, addresses: str, *, timeout_s: float, device: torch.device = CPU) -> None:
        self._addresses, self._timeout_s, self._device = addresses.split(","), timeout_s, device
        self._identity = device_identity(device)
        self._folder = new_in_memory()

    @property
    def folder(self) -> Path:
        """Returns the folder that readers read."""
        return self._folder.path

    def close(self) -> None:
        """Removes the folder.  Idempotent."""
        self._folder.close()

    def fetch(self, version: int) -> None:
        """Gets the version, and those on which its deltas build, from all ranks, unless they are here.

        A version that is here already is another of that number, or the same again: it is replaced.  Raises DeadlineError where a
        rank does not answer, and EngineError where it is gone or has not the version.
        """
        have = [number for number in versions_in(self.folder) if number < version]
        unfinished = self.folder / f"new{TEMPORARY_SUFFIX}"
        shutil.rmtree(unfinished, ignore_errors=True)
        for address in self._addresses:
            self._get(address, unfinished, version, have=have)
        for path in sorted(unfinished.iterdir()):
            final = self.folder / path.name
            shutil.rmtree(final, ignore_errors=True)
            path.rename(final)
        oldest = chain_start(self.folder, version)
        for number in versions_in(self.folder):
            if not oldest <= number <= version:
                shutil.rmtree(version_folder(self.folder, number), ignore_errors=True)

    @contextmanager
    def answering(self, version: int) -> Iterator[None]:
        """Gets the version in full where a reader in the context asks for it in the mirror."""
        done = threading.Event()
        thread = threading.Thread(target=self._answer, args=(version, done), name="full-version", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _answer(self, version: int, done: threading.Event) -> None:
        wanted = version_folder(self.folder, version) / WANTED
        while not done.wait(POLL_S):
            if not wanted.exists():
                continue
            try:
                unfinished = self.folder / f"full{TEMPORARY_SUFFIX}"
                for address in self._addresses:
                    self._get(address, unfinished, version, full=True)
                paths = sorted((unfinished / wanted.parent.name).iterdir(), key=lambda path: path.suffix == ".json")
                for path in paths:  # the lists last: with them the version counts as full
                    path.rename(wanted.parent / path.name)
            except (RlhubError, OSError) as error:
                logger.warning("version %d does not come in full: %s", version, error)
            return

    def _take(self, answer: Mapping[str, Any], to: Path, host: str) -> None:
        """Gets the files that a rank has announced."""
        how, files = answer["carrier"], answer["files"]
        if how == LINK:
            _link([(Path(answer["folder"]) / name, to / name) for name, _ in files])
            return
        device = self._device if how == NCCL else CPU
        _receive([(to / name, size) for name, size in files], Peer(host, int(answer["port"]), device, self._timeout_s))

    def _get(self, address: str, to: Path, version: int, *, have: Sequence[int] = (), full: bool = False) -> None:
        """Gets one rank's files."""
        place, _, token = address.removeprefix(SCHEME).partition("/")
        host, _, port = place.rpartition(":")
        dtypes = {path.name: path.read_text() for path in self.folder.glob(DTYPES)}
        try:
            with socket.create_connection((host, int(port)), timeout=self._timeout_s) as connection:
                lines = connection.makefile("rwb")
                asked = {"token": token, "version": version, "have": list(have), "full": full, "dtypes": dtypes}
                _send_line(lines, asked | {"device": self._identity})
                answer = json.loads(lines.readline() or "null")
                if answer is None:
                    raise EngineError(f"version {version} of the weights is not at {place}, or no longer: see the rank's log")
                self._take(answer, to, host)
        except TimeoutError as error:
            raise DeadlineError(
                f"version {version} of the weights from {place}", self._timeout_s, "does the rank run?"
            ) from error
        except (OSError, ValueError) as error:
            raise EngineError(f"version {version} of the weights cannot be had from {place}: {error}") from error


@dataclass(slots=True, frozen=True)
class Peer:
    """The other process of a transfer: the rank's address, and this process's device."""

    host: str
    port: int
    device: torch.device
    timeout_s: float

    def join(self, rank: int) -> Peers:
        """Connects the two."""
        return Peers.join(self.host, self.port, rank=rank, size=2, device=self.device, timeout_s=self.timeout_s)


def _send(paths: Sequence[Path], to: Peer) -> None:
    peers = to.join(0)
    try:
        for part in _chunks(_mapped(path, path.stat().st_size, shared=False) for path in paths):
            for pending in peers.exchange([(1, part.to(to.device))], []):
                pending.wait()
    finally:
        peers.close()


def _receive(files: Sequence[tuple[Path, int]], source: Peer) -> None:
    peers = source.join(1)
    try:
        for path, _ in files:
            path.parent.mkdir(parents=True, exist_ok=True)
        for part in _chunks(_mapped(path, size, shared=True) for path, size in files):
            arriving = part if source.device == CPU else torch.empty_like(part, device=source.device)
            for pending in peers.exchange([], [(0, arriving)]):
                pending.wait()
            if arriving is not part:
                part.copy_(arriving)
    finally:
        peers.close()


def _chunks(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield from (tensor[start : start + CHUNK_BYTES] for start in range(0, len(tensor), CHUNK_BYTES))


def _link(files: Sequence[tuple[Path, Path]]) -> None:
    """Gives files of this machine's memory a second name each: (the file, its new name)."""
    for path, name in files:
        name.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, name)
        except OSError as error:
            raise EngineError(
                f"{path} of the training rank on the same GPU cannot be linked ({error}): give their containers one /dev/shm, or "
                "set actor_rollout_ref.rollout.weights=folder"
            ) from error


def _mapped(path: Path, size: int, *, shared: bool) -> Tensor:
    """Returns the bytes of a file.  shared: the file is created, and gets what is written to them."""
    return torch.from_file(str(path), shared=shared, size=size, dtype=torch.uint8)


def _send_line(lines: Any, value: object) -> None:
    lines.write(json.dumps(value).encode() + b"\n")
    lines.flush()


def _wait(is_there: Callable[[], bool], what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_there():
        if time.monotonic() > deadline:
            raise DeadlineError(what, timeout_s, "does the trainer write it?")
        time.sleep(POLL_S)


@contextmanager
def _ignored() -> Iterator[None]:
    try:
        yield
    except OSError:
        return
