"""main_serve under requests that are wrong, hostile or cut off, and with an engine that breaks: it says so and goes on."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.breakable_engines import broken
from tests.support.serving import Server, serving

CONNECTION_S = 5.0
LIMIT_S = 240.0
COMPLETIONS, WEIGHTS = "/v1/completions", "/admin/weights"
SETTINGS = ("rollout.name=hf", "rollout.max_model_len=400", f"server.connection_s={CONNECTION_S}", "server.max_samples=64")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hostile")
    with serving(folder, *SETTINGS, plugins=["tests.support.breakable_engines"]) as found:
        yield found


def ask(server: Server, path: str, body: Any = None, *, raw: bytes | None = None, key: bytes | None = None) -> tuple[int, Any]:
    """Status and answer; with administration's key where the path is its."""
    right = server.admin_key if path.startswith("/admin") else server.key
    data = raw if raw is not None else json.dumps(body).encode() if body is not None else None
    connection = HTTPConnection(server.address.removeprefix("http://"), timeout=LIMIT_S)
    try:
        connection.putrequest("GET" if data is None else "POST", path)
        connection.putheader("Authorization", b"Bearer " + (right.encode() if key is None else key))
        if data is not None:
            connection.putheader("Content-Length", str(len(data)))
        connection.endheaders(data)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def greedy(server: Server) -> list[int]:
    body = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    status, answer = ask(server, COMPLETIONS, body)
    assert status == 200, answer
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"prompt": [10, 999999, 3]}, "prompt", "token id 999999 at place 1, outside the model's vocabulary of 259"),
        ({"prompt": [10, -1]}, "prompt", "token id -1"),
        ({"prompt": [[5], [2**70]]}, "prompt", f"token id {2**70}"),
        ({"prompt": [5], "stop_token_ids": [259]}, "stop_token_ids", "a stop token has token id 259"),
        ({"prompt": [5], "temperature": 1e-42}, "temperature", "temperature is 1e-42"),
        ({"prompt": [5], "top_k": 2**70}, "top_k", "top_k"),
        (
            {"prompt": [[5]] * 10, "n": 7},
            "prompt",
            "10 prompts x 7 = 70 answers, and a request has at most 64 (server.max_samples)",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_request_is_400_with_its_fault_and_the_next_one_is_answered(
    server: Server, body: dict[str, Any], param: str, said: str, stream: bool
) -> None:
    before = greedy(server)
    status, answer = ask(server, COMPLETIONS, {**body, "max_tokens": 3, "stream": stream})
    assert (status, answer["error"]["param"]) == (400, param) and said in answer["error"]["message"], answer
    assert greedy(server) == before and ask(server, "/health") == (200, {"status": "ok"})


DEEP = 100_000


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}", "not JSON"),
        (b'{"metadata": ' + b'{"a": ' * 500 + b"1" + b"}" * 500 + b"}", "nested deeper than 64 levels"),
        (b'{"prompt": "a\\ud800b"}', "a lone surrogate (\\ud800 at character 1)"),
        (b'{"\\udfff": 1}', "a lone surrogate"),
        (b'{"prompt": "\xff"}', "not JSON in UTF-8"),
    ],
    ids=["deeper than Python reads", "deep", "surrogate", "surrogate in a name", "no UTF-8"],
)
def test_a_body_that_would_surprise_whoever_works_with_it_is_400(server: Server, raw: bytes, said: str) -> None:
    status, answer = ask(server, COMPLETIONS, raw=raw)
    assert status == 400 and said in answer["error"]["message"], answer


@pytest.mark.parametrize("path", [COMPLETIONS, "/admin/pause"])
@pytest.mark.parametrize("key", ["schlüssel".encode(), b"\xff\xfe\xfc", b""])
def test_a_key_of_any_bytes_is_401(server: Server, path: str, key: bytes) -> None:
    assert ask(server, path, {}, key=key)[0] == 401


def test_clients_key_does_not_administer_and_administrations_does_not_generate(server: Server) -> None:
    for path in ("/admin/pause", "/admin/resume", WEIGHTS):
        status, answer = ask(server, path, {}, key=server.key.encode())
        assert status == 401 and "server.admin_key_file" in answer["error"]["message"]
    assert ask(server, "/admin/status", key=server.key.encode())[0] == 401
    assert ask(server, COMPLETIONS, {"prompt": "a"}, key=server.admin_key.encode())[0] == 401


def test_versions_only_rise_unless_another_run_begins(server: Server) -> None:
    present = ask(server, "/admin/status")[1]["version"]
    body = {"folder": str(server.model), "version": present + 7}
    assert ask(server, WEIGHTS, body)[0] == 200
    for version in (present + 7, present + 3):
        status, answer = ask(server, WEIGHTS, {**body, "version": version})
        assert status == 409, answer
        assert f"version {version} is not newer than version {present + 7}" in answer["error"]["message"]
    assert ask(server, WEIGHTS, {**body, "version": present + 3, "reset_version": True})[1]["version"] == present + 3


@pytest.mark.parametrize("folder", ["x" * 5000, "/nowhere", "a\0b"], ids=["5,000 characters", "missing", "null byte"])
def test_a_folder_that_is_none_is_400_and_changes_nothing(server: Server, folder: str) -> None:
    before = ask(server, "/admin/status")
    status, answer = ask(server, WEIGHTS, {"folder": folder, "version": 2**40})
    assert (status, answer["error"]["param"]) == (400, "folder"), answer
    assert ask(server, "/admin/status") == before


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"", b""),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuth", b""),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer KEY\r\nContent-Length: 9\r\n\r\n{", b"HTTP/1.1 408"),
    ],
    ids=["silent", "half a head", "half a body"],
)
def test_a_half_open_connection_expires(server: Server, sent: bytes, told: bytes) -> None:
    host, _, port = server.address.removeprefix("http://").partition(":")
    started = time.monotonic()
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
        connection.sendall(sent.replace(b"KEY", server.key.encode()))
        answer = connection.recv(4096)
        assert CONNECTION_S * 0.9 < time.monotonic() - started < LIMIT_S
        assert answer.startswith(told) if told else answer == b""
        assert not told or f"server.connection_s={CONNECTION_S:g}".encode() in answer


def test_an_engine_that_broke_is_503_and_built_anew_with_the_weights_it_had(server: Server, tmp_path: Path) -> None:
    folder = shutil.copytree(server.model, tmp_path / "moved")
    moved = {name: tensor * 1.3 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    first = greedy(server)
    assert ask(server, WEIGHTS, {"folder": str(folder), "version": 900})[0] == 200
    right = greedy(server)
    assert right != first, "the control: these are other weights"
    broken(server.model).write_text("no such kernel")
    status, answer = ask(server, COMPLETIONS, {"prompt": [5], "max_tokens": 2})
    assert status == 503 and "no such kernel" in answer["error"]["message"]
    status, answer = ask(server, "/health")
    assert status == 503 and "no such kernel" in answer["error"]["message"], "the break is told: no other is built yet"
    broken(server.model).unlink()
    deadline = time.monotonic() + LIMIT_S
    while (health := ask(server, "/health"))[0] != 200:
        assert health[0] == 503 and "no such kernel" in health[1]["error"]["message"]
        status, _ = ask(server, COMPLETIONS, {"prompt": [5], "max_tokens": 2})
        assert status == 503 or ask(server, "/health")[0] == 200, "answered only by one that was built anew meanwhile"
        assert time.monotonic() < deadline, "it is not built anew"
        time.sleep(0.02)
    assert greedy(server) == right
    status, told = ask(server, "/admin/status")
    assert (told["version"], told["failure"]) == (900, "")


def test_weights_that_cannot_be_read_again_are_not_replaced_by_others(server: Server, tmp_path: Path) -> None:
    folder = shutil.copytree(server.model, tmp_path / "gone")
    right = greedy(server)
    assert ask(server, WEIGHTS, {"folder": str(folder), "version": 1000})[0] == 200
    shutil.rmtree(folder)
    broken(server.model).write_text("no such kernel")
    assert ask(server, COMPLETIONS, {"prompt": [5], "max_tokens": 2})[0] == 503
    broken(server.model).unlink()
    deadline = time.monotonic() + LIMIT_S
    while "cannot be read again" not in (told := ask(server, "/admin/status")[1])["failure"]:
        assert time.monotonic() < deadline, told
        time.sleep(0.05)
    assert told["version"] == 1000 and ask(server, "/health")[0] == 503
    assert ask(server, COMPLETIONS, {"prompt": [5], "max_tokens": 2})[0] == 503
    assert ask(server, WEIGHTS, {"folder": str(server.model), "version": 1001})[0] == 200
    assert ask(server, "/health")[0] == 200 and len(greedy(server)) == len(right)
