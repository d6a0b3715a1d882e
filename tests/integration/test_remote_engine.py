"""main_serve in a process of its own, the remote engine here, and what an engine in this process says of the same weights."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhub.config.model import ModelConfig
from rlhub.config.rollout import RemoteConfig, RolloutConfig
from rlhub.engines.rollout.base import Completion, GenerationRequest, RolloutEngine, SamplingParams
from rlhub.engines.rollout.registry import build_rollout_engine
from rlhub.errors import ConfigError, EngineError
from tests.support.chat_model import save_chat_model
from tests.support.tiny_models import sequence_log_probs

START_S = 120.0
CLOSE = 2e-4  # between cached and whole forward passes in float32
PROMPTS = [[5, 6, 7, 13], [8, 9, 14, 5, 6], [20]]
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)


@dataclass
class Server:
    """A running main_serve."""

    model: Path
    address: str
    key_file: Path
    log: Path

    @property
    def key(self) -> str:
        return self.key_file.read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    model, ready, key, log = save_chat_model(folder / "model"), folder / "ready", folder / "key", folder / "log"
    command = [sys.executable, "-m", "rlhub.trainer.main_serve", f"model.path={model}", "rollout.name=hf", "server.port=0"]
    settings = [f"server.ready_file={ready}", f"server.api_key_file={key}", "rollout.max_model_len=400", "device=cpu"]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, *settings], stdout=stream, stderr=stream, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    deadline = time.monotonic() + START_S
    while not ready.is_file():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    yield Server(model=model, address=ready.read_text(), key_file=key, log=log)
    process.terminate()
    assert process.wait(30) == 0, log.read_text()


def build(server: Server, name: str, folder: Path | None = None) -> RolloutEngine:
    remote = RemoteConfig(
        urls=[server.address], api_key_file=str(server.key_file), weights_folder=str(folder) if folder else None, start_s=20.0
    )
    engine = build_rollout_engine(
        RolloutConfig(name=name, remote=remote),
        ModelConfig(path=str(server.model)),
        device=torch.device("cpu"),
        seed=0,
        max_prompt_length=100,
        max_response_length=300,
        load_checkpoint=True,
    )
    engine.initialize()
    return engine


def requests(seed: int = 0) -> list[GenerationRequest]:
    return [GenerationRequest(prompt_ids=prompt, seed=seed + index) for index, prompt in enumerate(PROMPTS)]


def weights(server: Server, seed: int) -> dict[str, Tensor]:
    """The model's, moved."""
    model = AutoModelForCausalLM.from_pretrained(server.model)
    generator = torch.Generator().manual_seed(seed)
    return {name: p.detach() + 0.03 * torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def expected(server: Server, values: dict[str, Tensor], prompt: list[int], completion: list[int]) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(server.model).eval()
    model.load_state_dict(values, strict=False)
    model.tie_weights()
    return sequence_log_probs(model, prompt, completion, 1.0)


def difference(found: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, right, strict=True))


def test_a_server_samples_what_the_engine_itself_samples_and_a_tokenizer_would_not(server: Server) -> None:
    remote, local = build(server, "remote"), build(server, "hf")
    found, right = remote.generate(requests(), PARAMS), local.generate(requests(), PARAMS)
    assert [one.token_ids for one in found] == [one.token_ids for one in right]
    assert max(difference(a.log_probs, b.log_probs) for a, b in zip(found, right, strict=True)) < CLOSE
    tokenizer = AutoTokenizer.from_pretrained(server.model)
    texts = [tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in right]
    again = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert again != [one.token_ids for one in right]  # the control: what a server that tokenizes text again would give
    later = [
        GenerationRequest(prompt_ids=[*request.prompt_ids, *whole.token_ids[:9]], seed=request.seed, start=9)
        for request, whole in zip(requests(), right, strict=True)
    ]
    assert [one.token_ids for one in remote.generate(later, PARAMS)] == [one.token_ids[9:] for one in right]
    with pytest.raises(ConfigError, match="weights_folder"):
        remote.update_weights([], 1)
    remote.shutdown()
    local.shutdown()


def test_new_weights_through_the_folder_are_those_that_generate(server: Server, tmp_path: Path) -> None:
    remote = build(server, "remote", tmp_path)
    before = remote.generate(requests(), PARAMS)
    for version in (1, 2):
        moved = weights(server, seed=version)
        remote.update_weights([[pair] for pair in moved.items()], version)
        found = remote.generate(requests(), PARAMS)
        for prompt, one in zip(PROMPTS, found, strict=True):
            assert one.versions == [version] * len(one.token_ids)
            assert difference(one.log_probs, expected(server, moved, prompt, one.token_ids)) < CLOSE
        old = expected(server, weights(server, seed=9), PROMPTS[0], found[0].token_ids)
        assert difference(found[0].log_probs, old) > 10 * CLOSE  # the control: other weights say other things
    assert [one.token_ids for one in before] != [one.token_ids for one in found]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy-0-1", "policy-0-2"]
    remote.shutdown()


def test_requests_go_on_under_weights_that_change(server: Server, tmp_path: Path) -> None:
    remote, params = build(server, "remote", tmp_path), SamplingParams(max_new_tokens=290, ignore_eos=True)
    moved = [weights(server, seed=11), weights(server, seed=12)]
    remote.update_weights([list(moved[0].items())], 11)

    async def run() -> list[Completion]:
        tasks = [asyncio.create_task(remote.agenerate(request, params)) for request in requests()]
        await asyncio.sleep(0.25)
        assert remote.load == len(tasks)
        with pytest.raises(EngineError, match="pause before"):
            remote.update_weights([list(moved[1].items())], 12)
        await asyncio.to_thread(remote.pause)
        await asyncio.to_thread(remote.update_weights, [list(moved[1].items())], 12)
        await asyncio.to_thread(remote.resume)
        return list(await asyncio.gather(*tasks))

    for prompt, one in zip(PROMPTS, asyncio.run(run()), strict=True):
        assert len(one.token_ids) == len(one.log_probs) == len(one.versions) == 290
        assert set(one.versions) == {11, 12}
        assert one.versions == sorted(one.versions)
        cut = one.versions.index(12)
        for values, part in zip(moved, (slice(0, cut), slice(cut, None)), strict=True):
            right = expected(server, values, prompt, one.token_ids)
            assert difference(one.log_probs[part], right[part]) < CLOSE
    remote.shutdown()


def test_cancelled_and_aborted_requests_end_on_the_server(server: Server) -> None:
    remote, params = build(server, "remote"), SamplingParams(max_new_tokens=290, ignore_eos=True)

    async def run() -> None:
        tasks = [asyncio.create_task(remote.agenerate(request, params)) for request in requests()]
        await asyncio.sleep(0.2)
        tasks[0].cancel()
        await asyncio.sleep(0.05)
        remote.abort()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(ended[0], asyncio.CancelledError)
        assert [one.finish_reason for one in ended[1:] if isinstance(one, Completion)] == ["abort", "abort"]

    asyncio.run(run())
    assert remote.load == 0
    remote.shutdown()


def test_openais_client_and_the_server_s_own_key(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key=server.key)
    answer = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "hello"}], max_tokens=5, logprobs=True
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 5
    chunks = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "hello"}], max_tokens=5, stream=True
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] in ("stop", "length")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.address}/v1", api_key="wrong").models.list()
    with pytest.raises(openai.InternalServerError, match="no weights in"):
        client.with_options(max_retries=0).post(
            f"{server.address}/admin/weights", body={"folder": "/nowhere", "version": 3}, cast_to=object
        )
    assert client.models.list().data[0].id == "policy"
