"""The remote engine against a server that answers from the record of SGLang's interface, under the contract of engines."""

from __future__ import annotations

import ast
import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rlhub.config.sections.rollout import RemoteConfig, RolloutConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.engines.rollout.base import Completion, Progress, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine
from rlhub.engines.rollout.remote.engine import RemoteEngine
from rlhub.errors import EngineError, RequestError
from scripts.checks.sglang_contract import differences, fields_of, routes_of
from tests.support import rollout_contract as contract
from tests.support.sglang_server import RECORD, SGLang, log_prob, serving

WEIGHTS = {"a": torch.ones(2, 2), "b": torch.zeros(3)}
MAX_MODEL_LEN = 64
LIMIT_S = 60.0


def build(at: SGLang, folder: Path | None, **more: object) -> RemoteEngine:
    remote = RemoteConfig(urls=[at.url], server="sglang", weights_folder=str(folder) if folder else None, **more)  # type: ignore[arg-type]
    engine = build_rollout_engine(
        RolloutSetup(
            config=RolloutConfig(name="remote", remote=remote),
            model=ModelConfig(),
            device=torch.device("cpu"),
            seed=0,
            max_prompt_length=MAX_MODEL_LEN // 2,
            max_response_length=MAX_MODEL_LEN // 2,
            load_checkpoint=folder is None,
        )
    )
    assert isinstance(engine, RemoteEngine)
    engine.initialize()
    return engine


@pytest.fixture(params=[False, True], ids=["cumulative", "incremental"])
def at(request: pytest.FixtureRequest) -> Iterator[SGLang]:
    with serving(incremental=request.param) as found:
        yield found


@pytest.fixture
def engine(at: SGLang, tmp_path: Path) -> Iterator[RemoteEngine]:
    built = build(at, tmp_path)
    built.update_weights([list(WEIGHTS.items())], 1)
    yield built
    built.shutdown()


def test_contract(engine: RemoteEngine) -> None:
    contract.check_generation(engine)
    contract.check_refusals(engine, MAX_MODEL_LEN)
    contract.check_weight_stream(engine, list(WEIGHTS.items()))
    contract.check_live_weights(engine, WEIGHTS)
    contract.check_overwriting(engine, WEIGHTS)
    contract.check_agenerate(engine)


def test_what_is_sent_and_read(engine: RemoteEngine, at: SGLang) -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=3, stop_token_ids=(2,))
    (found,) = engine.generate(contract.requests()[:1], params)
    sent = at.bodies[-1]
    assert sent["input_ids"] == contract.PROMPTS[0] and sent["return_logprob"] is True
    sampling = sent["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"], sampling["max_new_tokens"]) == (0.7, 0.9, 5, 3)
    assert found.log_probs == [log_prob(token) for token in found.token_ids] and found.versions == [1] * 3
    assert at.calls[-3:] == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    assert at.weight_version == "1"


def test_what_the_server_refuses_is_an_error(engine: RemoteEngine, at: SGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhub.engines.rollout.remote.engine.check_requests", lambda *_, **__: None)
    with pytest.raises(RequestError, match="top_p must be in"):
        engine.generate(contract.requests()[:1], SamplingParams(top_p=0.0, max_new_tokens=1))
    monkeypatch.setattr(engine._staging, "write", lambda version: Path("/missing"))
    with pytest.raises(EngineError, match="Failed to get weights"):
        engine.update_weights([list(WEIGHTS.items())], 2)
    assert not at.paused, "other jobs may use the server"


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("followed", [False, True])
@pytest.mark.parametrize("held", [0, 4])
def test_a_pause_ends_requests_that_go_on_with_their_tokens(engine: RemoteEngine, at: SGLang, followed: bool, held: int) -> None:
    """Of requests that run, or still wait for a place (held 0), and of one that comes during the pause."""
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    told: list[list[Progress]] = [[] for _ in contract.PROMPTS]
    at.hold, at.waits = held or None, not held

    async def run() -> list[Completion]:
        tasks = [
            asyncio.create_task(engine.agenerate(one, params, heard.append if followed else None))
            for one, heard in zip(contract.requests(), told, strict=True)
        ]
        await _until(lambda: (at.running(held) if held else at.waiting) == len(tasks))
        with pytest.raises(EngineError, match="pause before"):
            engine.update_weights([list(WEIGHTS.items())], 2)
        await asyncio.to_thread(engine.pause)
        assert at.paused and not any(task.done() for task in tasks)
        tasks.append(asyncio.create_task(engine.agenerate(contract.requests()[0], params)))
        await asyncio.to_thread(engine.update_weights, [[(name, tensor + 1) for name, tensor in WEIGHTS.items()]], 2)
        at.thread.run(at.lift())
        await asyncio.to_thread(engine.resume)
        return list(await asyncio.gather(*tasks))

    first = len(at.bodies)
    *found, late = asyncio.run(run())
    assert late.versions == [2] * 10
    for prompt, one, heard in zip(contract.PROMPTS, found, told, strict=True):
        assert one.versions == [1] * held + [2] * (10 - held) and one.finish_reason == "length"
        assert one.log_probs == [log_prob(token) for token in one.token_ids]
        again = [body for body in at.bodies[first:] if body["input_ids"] == [*prompt, *one.token_ids[:held]]][-1]
        assert again["sampling_params"]["max_new_tokens"] == 10 - held
        if held:
            seeds = {body["sampling_params"]["sampling_seed"] for body in at.bodies[first:] if body["input_ids"] == prompt}
            assert again["sampling_params"]["sampling_seed"] not in seeds, "the noise of the first tokens is not repeated"
        if followed:
            assert [token for part in heard for token in part.token_ids] == one.token_ids
            assert [version for part in heard for version in part.versions] == one.versions


def test_a_server_that_an_ended_job_left_paused_is_woken_by_the_next(at: SGLang, tmp_path: Path) -> None:
    """Its /health samples a token, so it would say nothing good before."""
    at.paused = True
    job = build(at, tmp_path, start_s=5.0)
    job.update_weights([list(WEIGHTS.items())], 1)
    assert job.generate(contract.requests()[:1], SamplingParams(max_new_tokens=2))[0].versions == [1, 1] and not at.paused
    job.shutdown()


def test_a_field_that_sglang_has_not_is_noticed(engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang ignores it, so that a misspelled one would have no effect."""
    generate = engine._dialect.generate

    def misspelled(*arguments: object) -> object:
        call = generate(*arguments)  # type: ignore[arg-type]
        call.body["sampling_params"]["max_tokens"] = call.body["sampling_params"].pop("max_new_tokens")
        return call

    monkeypatch.setattr(engine._dialect, "generate", misspelled)
    with pytest.raises(RequestError, match="SamplingParams has no .'max_tokens'."):
        engine.generate(contract.requests()[:1], SamplingParams(max_new_tokens=1))


SOURCE = """
@app.get("/model_info")
async def model_info(): ...
@app.api_route("/generate", methods=["POST", "PUT"])
async def generate(): ...
class GenerateReqInput:
    input_ids: list
    stream: bool = False
"""


def test_the_check_of_the_record_notices_what_sources_lack() -> None:
    tree = ast.parse(SOURCE)
    assert set(routes_of(tree)) == {("/model_info", "GET"), ("/generate", "POST"), ("/generate", "PUT")}
    assert fields_of({"a": tree}, "GenerateReqInput") == {"input_ids", "stream"}
    record = {
        "calls": {
            "/generate": {"method": "POST", "fields": {"GenerateReqInput": ["input_ids", "ids"]}, "answers": {}},
            "/gone": {"method": "GET", "answers": {"a": {"body": {"words": 1}}}},
        }
    }
    trees = {"sglang/srt/entrypoints/http_server.py": tree}
    assert list(differences(record, trees)) == [
        "/generate: GenerateReqInput has no field ids",
        "GET /gone is no route",
        "/gone: no answer is made with 'words'",
    ]
    assert RECORD["version"] == "0.5.23"
