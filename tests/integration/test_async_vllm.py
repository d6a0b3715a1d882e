"""A tensor-parallel replica over vLLM's AsyncLLM: its tokens, its weights in flight, its faults, its end.

One replica serves all tests: four processes import vLLM.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.errors import RequestError, WeightMismatchError, WorkerDiedError, WorkerError
from rlhub.sharding_manager.files import WeightWriter
from rlhub.single_controller import AsyncActor, AsyncActorOptions, ClassWithInitArgs, start_async_actor
from rlhub.utils.aio.loop_thread import LoopThread
from rlhub.workers.memory_handover import WorkerRuntime
from tests.integration.async_vllm_replica import LookedInto
from tests.support.chat_model import save_chat_model
from tests.support.plain_train_engine import PlainTrainEngine
from tests.support.processes import all_end
from tests.support.rollout_contract import PROMPTS
from tests.support.step_limit import VARIABLE
from tests.support.tiny_models import full_forward, greedy_reference, save_tiny_model, sequence_log_probs, tiny_model

TOLERANCE = 2e-5
LIMIT_S = 600.0  # four processes import vLLM, on a machine that may be busy
NEW_TOKENS = 60
LONG_PROMPT = [3 + i % 60 for i in range(70)]  # more than two blocks of the cache
RUNTIME = WorkerRuntime(device="cpu", seed=0, max_prompt_length=80, max_response_length=NEW_TOKENS, deadline_s=LIMIT_S)
SAMPLING = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
FLIPPED = ("model.layers.1.self_attn.k_proj.bias", "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight")


class Replica:
    """The replica, and a trainer's side of the folder with two sets of weights."""

    def __init__(self, folder: Path) -> None:
        path = folder / "model"
        save_chat_model(path)  # its tokenizer
        save_tiny_model(path)
        config = ActorRolloutRefConfig()
        config.model.path = str(path)
        config.rollout.name, config.rollout.mode = "vllm", "async"
        config.rollout.tensor_model_parallel_size, config.rollout.max_num_seqs = 2, 16
        options = AsyncActorOptions(
            name="rollout-0",
            num_cpus=0.0,
            worker_env={VARIABLE: str(folder / "limit")},
            log_dir=str(folder / "logs"),
            start_deadline_s=LIMIT_S,
        )
        self.folder = folder / "weights"
        self.models: dict[int, PreTrainedModel] = {}
        self.actor: AsyncActor = start_async_actor(ClassWithInitArgs(LookedInto, config, RUNTIME), options)
        self._loop = LoopThread("caller")
        self.call("start")

    def call(self, method: str, *arguments: Any) -> Any:
        return self._loop.run(self.actor.call(method, *arguments, deadline_s=LIMIT_S))

    def write(self, version: int, seed: int) -> str:
        self.models[version] = tiny_model(seed=seed)
        return WeightWriter(PlainTrainEngine(self.models[version]), self.folder, bucket_bytes=1 << 16).write(version).fingerprint

    def publish(self, version: int, seed: int) -> Any:
        self.write(version, seed)
        return self.call("update_weights", str(self.folder), version)

    def greedy(self) -> list[Completion]:
        params = SamplingParams(temperature=0.0, max_new_tokens=16)
        return [self.call("agenerate", GenerationRequest(prompt_ids=prompt, seed=0), params) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def replica(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    found = Replica(tmp_path_factory.mktemp("async_vllm"))
    yield found
    found.actor.kill()
    found._loop.stop()


def until(holds: Callable[[], bool], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.05)


def shared_memory(pids: list[int]) -> set[Path]:
    """Segments that these processes have mapped under names which still stand."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/psm_" in line]
    return {path for line in lines if (path := Path(line.split()[-1])).exists()}


def check_greedy(replica: Replica, version: int) -> None:
    for prompt, completion in zip(PROMPTS, replica.greedy(), strict=True):
        tokens, log_probs = greedy_reference(replica.models[version], prompt, 16)
        assert completion.token_ids == tokens
        assert completion.log_probs == pytest.approx(log_probs, abs=TOLERANCE)
        assert completion.versions == [version] * 16


def test_it_generates_with_the_weights_of_the_folder(replica: Replica) -> None:
    with pytest.raises(WorkerError, match="no whole set of weights"):
        replica.greedy()
    first, second = replica.publish(1, seed=1), replica.publish(2, seed=2)
    assert first.fingerprint != second.fingerprint
    check_greedy(replica, 2)
    assert replica.publish(3, seed=1).fingerprint != second.fingerprint
    check_greedy(replica, 3)


def test_each_worker_holds_its_part(replica: Replica) -> None:
    workers = replica.call("in_workers", "held")
    assert len(workers) == 2
    for name, here, whole in workers[1]:
        cut = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        halved = "norm" not in name
        assert here[cut] == (whole[cut] // 2 if halved else whole[cut]) or "embed_tokens" in name, name


def test_equal_seeds_repeat_and_log_probs_are_those_of_the_model(replica: Replica) -> None:
    replica.publish(4, seed=1)
    params = SamplingParams(temperature=0.7, max_new_tokens=20, ignore_eos=True)
    same, again, other = (
        replica.call("agenerate", GenerationRequest(prompt_ids=LONG_PROMPT, seed=seed), params) for seed in (5, 5, 6)
    )
    assert same.token_ids == again.token_ids != other.token_ids
    for one in (same, other):
        expected = sequence_log_probs(replica.models[4], LONG_PROMPT, one.token_ids, 0.7)
        assert one.log_probs == pytest.approx(expected, abs=TOLERANCE)
    plain = SamplingParams(max_new_tokens=6, ignore_eos=True)
    alone, ranked = (
        replica.call("agenerate", GenerationRequest(prompt_ids=LONG_PROMPT, seed=5), params)
        for params in (plain, replace(plain, top_log_probs=4, prompt_log_probs=True))
    )
    assert ranked.token_ids == alone.token_ids and ranked.log_probs == pytest.approx(alone.log_probs, abs=TOLERANCE)
    every = full_forward(replica.models[4], [*LONG_PROMPT, *alone.token_ids]).log_softmax(-1)
    read = every[torch.arange(len(LONG_PROMPT) - 1), torch.tensor(LONG_PROMPT[1:])].tolist()
    assert [log_prob for log_prob, _ in ranked.prompt_log_probs] == pytest.approx(read, abs=TOLERANCE)
    for place, top in enumerate([*(top for _, top in ranked.prompt_log_probs), *ranked.top_log_probs]):
        assert [value for _, value in top] == pytest.approx(every[place].topk(4).values.tolist(), abs=TOLERANCE)


def test_a_token_id_that_the_model_has_not_is_refused_and_the_replica_goes_on(replica: Replica) -> None:
    replica.publish(5, seed=1)
    for ids, stops in (([5, 10**6], ()), ([5], (10**6,))):
        params = SamplingParams(max_new_tokens=4, stop_token_ids=stops)
        with pytest.raises(WorkerError, match="token id 1000000 at place") as refused:
            replica.call("agenerate", GenerationRequest(prompt_ids=ids, seed=0), params)
        assert isinstance(refused.value.__cause__, RequestError)
    assert replica.call("status").failure == ""
    check_greedy(replica, 5)


def interrupted(replica: Replica, version: int, *, recompute: bool) -> tuple[list[float], list[float], float]:
    """Largest errors of log-probs before and after an update in flight, and of a request that came during it."""
    replica.publish(version, seed=1)
    replica.write(version + 1, seed=2)
    wanted = [GenerationRequest(prompt_ids=prompt, seed=seed) for seed, prompt in enumerate([*PROMPTS, LONG_PROMPT])]
    late = GenerationRequest(prompt_ids=LONG_PROMPT, seed=77)
    found = replica.call("interrupt", wanted, late, SAMPLING, str(replica.folder), version + 1, recompute)
    completions, last, told, report = found
    assert report.pause_s < report.read_s
    before, after = [], []
    for request, completion, parts in zip(wanted, completions, told, strict=True):
        at = completion.versions.count(version)
        assert completion.versions == [version] * at + [version + 1] * (NEW_TOKENS - at) and 0 < at < NEW_TOKENS
        assert len(completion.token_ids) == len(completion.log_probs) == NEW_TOKENS
        for name in ("token_ids", "log_probs", "versions"):
            assert [value for part in parts for value in getattr(part, name)] == getattr(completion, name), name
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
        old, new = (
            sequence_log_probs(replica.models[number], list(request.prompt_ids), completion.token_ids, 1.0)
            for number in (version, version + 1)
        )
        before.append(max(abs(a - b) for a, b in zip(old[:at], completion.log_probs[:at], strict=True)))
        after.append(max(abs(a - b) for a, b in zip(new[at:], completion.log_probs[at:], strict=True)))
    expected = sequence_log_probs(replica.models[version + 1], LONG_PROMPT, last.token_ids, 1.0)
    assert set(last.versions) == {version + 1}
    return before, after, max(abs(a - b) for a, b in zip(expected, last.log_probs, strict=True))


def test_requests_go_on_under_new_weights(replica: Replica) -> None:
    before, after, late = interrupted(replica, 10, recompute=True)
    assert max(*before, *after, late) < TOLERANCE
    before, after, late = interrupted(replica, 20, recompute=False)
    assert max(*before, late) < TOLERANCE, "a new request reads nothing that was computed with old weights"
    assert min(after) > 1e-3, "the control: old keys and values"


@pytest.mark.parametrize("how", ["abort", "abort while paused", "cancel", "a follower that raises"])
def test_requests_end_early(replica: Replica, how: str) -> None:
    replica.publish(30, seed=1)
    request = GenerationRequest(prompt_ids=PROMPTS[0], seed=3, request_id="mine")
    whole = replica.call("agenerate", request, SAMPLING)
    part, left = replica.call("part", request, SAMPLING, how)
    assert left == 0
    if part is not None:
        assert part.finish_reason == "abort" and 0 < len(part.token_ids) < NEW_TOKENS
        assert part.token_ids == whole.token_ids[: len(part.token_ids)]
        assert len(part.token_ids) == len(part.log_probs) == len(part.versions)


@pytest.mark.parametrize("name", FLIPPED)
def test_one_flipped_element_in_a_worker_is_found_by_name(replica: Replica, name: str) -> None:
    replica.publish(40, seed=1)
    replica.call("in_workers", "flip_at_next_update", name, False)
    replica.publish(41, seed=2)
    replica.call("in_workers", "flip_at_next_update", name, True)
    with pytest.raises(WorkerError) as caught:
        replica.publish(42, seed=1)
    assert isinstance(caught.value.__cause__, WeightMismatchError) and caught.value.__cause__.weight == name
    replica.publish(43, seed=2)
    check_greedy(replica, 43)


def test_a_damaged_version_changes_nothing(replica: Replica) -> None:
    replica.publish(50, seed=1)
    replica.write(51, seed=2)
    file = next((replica.folder / "version-51").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(WorkerError, match="another checksum"):
        replica.call("update_weights", str(replica.folder), 51)
    check_greedy(replica, 50)


def test_a_killed_replica_leaves_no_process(replica: Replica) -> None:
    family = [*replica.call("processes"), replica.call("status").pid]
    assert len(family) >= 4, "replica, engine core, two workers"
    memory = shared_memory(family)
    assert memory, "vLLM's queues between the processes"
    os.kill(family[-1], signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        replica.greedy()
    assert all_end(family)
    until(lambda: not any(path.exists() for path in memory))
