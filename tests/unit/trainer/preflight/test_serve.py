"""What keeps a server from serving is found before its engine is built and its model is loaded."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhub.config.sections.serve import ServeConfig
from rlhub.trainer.preflight import serve as serve_checks
from rlhub.trainer.preflight.serve import check

MODEL = {"model_type": "qwen2", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(MODEL | {"max_position_embeddings": 128}))
    Path("no_model").mkdir()


def served(change: Callable[[ServeConfig], object] = lambda _: None) -> list[str]:
    config = ServeConfig(device="cpu")
    config.model.path, config.rollout.name, config.server.port = "model", "hf", 0
    change(config)
    return check(config, set())


def put(path: str, value: object) -> Callable[[ServeConfig], object]:
    section, _, name = path.rpartition(".")
    return lambda config: setattr(getattr(config, section) if section else config, name, value)


def test_what_is_well_is_served() -> None:
    assert served() == served(put("rollout.max_model_len", 128)) == served(put("server.ready_file", "ready")) == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("model.path", "nowhere", "model.path=nowhere: no such folder, and not in the hub's cache"),
        ("model.path", "a/b/nowhere", "model.path=a/b/nowhere: no such folder"),
        ("model.path", "no_model", "no_model/config.json does not exist"),
        ("model.path", "model/config.json", "model.path=model/config.json: no such folder"),
        ("rollout.max_model_len", 129, "rollout.max_model_len=129 tokens, but model has 128 positions"),
        ("server.host", "203.0.113.7", "server.host=203.0.113.7, server.port=0: cannot listen there"),
        ("server.port", 70000, "server.port=70000: at most 65535"),
        ("server.ready_file", "nowhere/ready", "server.ready_file=nowhere/ready: "),
        ("server.ready_file", "model", "server.ready_file=model: "),
        ("server.api_key_file", "nowhere/key", "server.api_key_file=nowhere/key: "),
    ],
)
def test_each_fault_is_one_problem(path: str, value: object, said: str) -> None:
    (problem,) = served(put(path, value))
    assert problem.startswith(said) or said in problem, problem


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (problem,) = served(put("server.port", port))
        assert f"server.port={port}: cannot listen there" in problem and "0 for any free one" in problem
    assert served(put("server.port", port)) == []


def test_a_name_that_is_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    (problem,) = served(put("server.host", "no.such.host"))
    assert problem.startswith("server.host=no.such.host: Name or service not known; 127.0.0.1")


@pytest.mark.parametrize(
    ("gpus", "said"), [(0, "device=cuda: no GPU found"), (1, "device=cuda: the installed torch is a CPU build")]
)
def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, gpus: int, said: str) -> None:
    monkeypatch.setattr(serve_checks, "count_gpus", lambda: gpus)
    monkeypatch.setattr(serve_checks, "torch_has_cuda", lambda: False)
    (problem,) = served(put("device", "cuda"))
    assert problem.startswith(said)


@pytest.mark.parametrize("name", ["vllm", "vllm_async"])
def test_an_engine_in_parts_is_served_by_vllm(name: str) -> None:
    config = ServeConfig(device="cpu")
    config.rollout.name, config.rollout.tensor_model_parallel_size = name, 2
    assert check(config, set()) == []


def test_each_finding_names_its_key() -> None:
    config = ServeConfig(device="cpu", plugins=["no_such_module_here"])
    config.rollout.name, config.rollout.tensor_model_parallel_size, config.server.tool_format = "hf", 2, "hermse"
    plugin, tool_format, size = check(config, set())
    assert plugin.startswith("plugins: importing 'no_such_module_here' failed")
    assert tool_format.startswith("server.tool_format: ") and "hermes" in tool_format
    assert size.startswith("rollout.tensor_model_parallel_size=2 with rollout.name=hf") and "rollout.name=vllm" in size
    config.rollout.name = "hff"
    assert any(problem.startswith("rollout.name: ") for problem in check(config, set()))


def test_a_driver_that_cannot_be_used_is_found_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"count_gpus": 1, "torch_has_cuda": True, "driver_problem": "the NVIDIA driver 535.1 is too old"}.items():
        monkeypatch.setattr(serve_checks, name, lambda value=value: value)
    for device in ("auto", "cuda"):
        (problem,) = check(ServeConfig(device=device), set())
        assert problem == f"device={device}: the NVIDIA driver 535.1 is too old; device=cpu serves without"
    assert check(ServeConfig(device="cpu"), set()) == []
