"""Ports that are told to others before they are used."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rlhub.utils import ports


@pytest.fixture
def connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's range of ports for connections."""
    file = tmp_path / "range"
    monkeypatch.setattr(ports, "RANGE_OF_CONNECTIONS", file)
    return file


def test_none_that_a_connection_may_take(connections: Path) -> None:
    connections.write_text("20500\t60999\n")
    assert all(20_000 <= ports.free_port() < 20_500 for _ in range(50))


def test_none_that_somebody_listens_on(connections: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        monkeypatch.setattr(ports, "FIRST", taken)
        connections.write_text(f"{taken + 2} 60999")
        assert taken not in {ports.free_port() for _ in range(20)}


def test_none_that_another_was_given_and_has_not_used_yet(connections: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connections.write_text("20500 60999")
    given = ports.free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", given))
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", given))
        server.listen()
        socket.create_connection(("127.0.0.1", given), 5).close()
    monkeypatch.setattr(ports, "NUM_KEPT", 3)
    ports._kept.clear()
    kept = [ports.free_port() for _ in range(4)]
    with socket.socket() as other:
        other.bind(("", kept[0]))  # no longer kept


@pytest.mark.parametrize("text", ["1024 60999", "20000 60999", "", "strange", None])
def test_any_that_is_free_where_the_system_leaves_no_others(connections: Path, text: str | None) -> None:
    if text is not None:
        connections.write_text(text)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", ports.free_port()))
