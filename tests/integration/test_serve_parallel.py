"""main_serve with a tensor-parallel engine: vLLM in processes of its own behind the endpoint, and weights in each of them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from transformers import AutoModelForCausalLM

from rlhub.engines.rollout.base import Completion, GenerationRequest, Progress, SamplingParams
from rlhub.sharding_manager.files import WeightWriter
from tests.support.plain_train_engine import PlainTrainEngine
from tests.support.processes import all_end
from tests.support.serving import START_S, Server, build, difference, expected, serving, started, weights

CLOSE = 2e-4
PROMPTS = [[5, 6, 7, 13], [8, 9, 14, 5, 6], [20]]
VLLM = ("rollout.name=vllm", "rollout.tensor_model_parallel_size=2", "rollout.max_model_len=400", "rollout.max_num_seqs=16")


def test_a_model_in_two_parts_is_served_and_takes_new_weights(tmp_path: Path) -> None:
    """One server for all of it: four processes import vLLM."""
    with serving(tmp_path, *VLLM) as server:
        assert len(server.family) >= 4, "server, engine core, two workers"
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key=server.key, max_retries=0)
        check_stream(server, client)
        check_requests_in_flight(server, tmp_path / "weights")
        check_trainer_folder(server, client, tmp_path / "versions")
        check_killed_worker(server, client)
    assert all_end(server.family), "a process is left"


def check_stream(server: Server, client: openai.OpenAI) -> None:
    """With the model's own weights, as version 0, and told while the engine is held before the next ones."""
    extra = {"return_token_ids": True, "ignore_eos": True}
    told: list[Any] = []
    ids: list[int] = []

    def hear(chunk: Any) -> None:
        if chunk.choices[0].logprobs:
            told.append(chunk.choices[0])
            ids.extend(chunk.choices[0].model_extra["token_ids"])

    server.limit.set(1)
    chunks = client.completions.create(
        model="policy", prompt=PROMPTS[0], max_tokens=40, logprobs=0, stream=True, extra_body=extra
    )
    for limit in (1, 10, 30):
        server.limit.set(limit)
        while len(ids) < limit:
            hear(next(chunks))
        assert len(ids) == limit
    server.limit.lift()
    for chunk in chunks:
        hear(chunk)
    log_probs = [value for choice in told for value in choice.logprobs.token_logprobs]
    assert len(ids) == 40
    assert {version for choice in told for version in choice.model_extra["token_versions"]} == {0}
    assert difference(log_probs, expected(server, {}, PROMPTS[0], ids)) < CLOSE


def check_requests_in_flight(server: Server, folder: Path) -> None:
    """Weights by a Hugging Face folder, under requests of another job that are too long to end by themselves."""
    remote, params = build(server, "remote", folder), SamplingParams(max_new_tokens=280, ignore_eos=True)
    moved = [weights(server, seed=11), weights(server, seed=12)]
    remote.update_weights([list(moved[0].items())], 11)
    versions: list[set[int]] = [set() for _ in PROMPTS]

    async def run() -> list[Completion]:
        changed = asyncio.Event()

        def follow(index: int, progress: Progress) -> None:
            versions[index].update(progress.versions)
            changed.set()

        async def all_have(version: int) -> None:
            while not all(version in seen for seen in versions):
                changed.clear()
                await asyncio.wait_for(changed.wait(), 240)

        def ask() -> list[asyncio.Task[Completion]]:
            return [
                asyncio.create_task(
                    remote.agenerate(GenerationRequest(prompt_ids=ids, seed=index), params, partial(follow, index))
                )
                for index, ids in enumerate(PROMPTS)
            ]

        tasks = await started(server, ask, 20)
        await all_have(11)
        await asyncio.to_thread(remote.pause)
        await asyncio.to_thread(remote.update_weights, [list(moved[1].items())], 12)
        server.limit.lift()
        await asyncio.to_thread(remote.resume)
        await all_have(12)
        remote.abort()
        return list(await asyncio.gather(*tasks))

    for prompt, one in zip(PROMPTS, asyncio.run(run()), strict=True):
        assert one.versions == sorted(one.versions) and set(one.versions) == {11, 12}
        assert len(one.token_ids) == len(one.log_probs) == len(one.versions)
        cut = one.versions.index(12)
        old, new = (expected(server, values, prompt, one.token_ids) for values in moved)
        assert difference([*old[:cut], *new[cut:]], one.log_probs) < CLOSE
        assert difference(old[cut:], one.log_probs[cut:]) > 10 * CLOSE, "the control: other weights say other things"
    remote.shutdown()


def check_trainer_folder(server: Server, client: openai.OpenAI, folder: Path) -> None:
    """Weights by a trainer's own folder; one that is not there changes nothing."""
    moved = weights(server, seed=21)
    model = AutoModelForCausalLM.from_pretrained(server.model)
    model.load_state_dict(moved, strict=False)
    WeightWriter(PlainTrainEngine(model), folder, bucket_bytes=1 << 16).write(21)
    reload, administration = f"{server.address}/admin/weights", client.with_options(api_key=server.admin_key)
    administration.post(reload, body={"folder": str(folder), "version": 21}, cast_to=object)
    for wrong, refusal in ((22, openai.BadRequestError), (20, openai.ConflictError)):
        with pytest.raises(refusal, match="version"):
            administration.post(reload, body={"folder": str(folder), "version": wrong}, cast_to=object)
    check_version_21(server, client)


def check_version_21(server: Server, client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(model="policy", prompt=PROMPTS[1], max_tokens=30, logprobs=0, extra_body=extra)
    choice = answer.choices[0]
    assert choice.model_extra["token_versions"] == [21] * 30
    right = expected(server, weights(server, seed=21), PROMPTS[1], choice.model_extra["token_ids"])
    assert difference(choice.logprobs.token_logprobs, right) < CLOSE


def check_killed_worker(server: Server, client: openai.OpenAI) -> None:
    """The server says that it cannot generate, builds the engine anew, and has the same weights again."""
    main = psutil.Process(server.family[0])
    (core,) = [child for child in main.children() if child.children()]
    os.kill(core.children()[0].pid, signal.SIGKILL)
    statuses: list[int] = []
    deadline = time.monotonic() + START_S
    while not statuses or statuses[-1] != 200 or 503 not in statuses:
        assert time.monotonic() < deadline, f"it is not built anew: {statuses[-20:]}"
        statuses.append(httpx.get(f"{server.address}/health", timeout=60).status_code)
        time.sleep(0.05)
    check_version_21(server, client)
    server.family += [child.pid for child in main.children(recursive=True)]
