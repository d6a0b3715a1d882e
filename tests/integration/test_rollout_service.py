"""The rollout service in real processes: hf replicas in asyncio Ray actors take weights in flight, are killed, come and go."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.engines.rollout.base import Completion, Follow, GenerationRequest, SamplingParams
from rlhub.engines.rollout.continuous_batching import SteppedEngine
from rlhub.errors import EngineError, WeightMismatchError, WorkerDiedError
from rlhub.rollout_service.fleet import FleetLimits
from rlhub.rollout_service.server import ReplicaStatus, RolloutServer, UpdateReport
from rlhub.rollout_service.service import RolloutService, ServiceOptions
from rlhub.sharding_manager.files import SHARED_MEMORY, WeightWriter
from rlhub.single_controller import ClassWithInitArgs, LaunchOptions, launch
from rlhub.single_controller.decorator import registered_methods
from rlhub.workers.actor import ActorWorker
from rlhub.workers.memory_handover import WorkerRuntime
from tests.support.chat_model import save_chat_model
from tests.support.plain_train_engine import PlainTrainEngine
from tests.support.rollout_service import PACE, LimitedSteps

NEW_TOKENS = 150
WAIT_S = 240.0  # a replica starts in seconds, unless the machine has much else to do
RUNTIME = WorkerRuntime(device="cpu", seed=0, max_prompt_length=32, max_response_length=NEW_TOKENS, deadline_s=WAIT_S)
SAMPLING = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)


class Paced(RolloutServer):
    """Its requests get no more tokens than they are allowed."""

    async def start(self) -> None:
        await super().start()
        assert isinstance(self.engine, SteppedEngine)
        loop = self.engine._loop
        make = loop._make_stepper
        loop._make_stepper = lambda: LimitedSteps(make(), PACE)

    async def set_pace(self, limit: int | None) -> None:
        PACE.set(limit)

    async def furthest(self) -> int:
        return PACE.furthest


class Job:
    """A trainer in this process and its service."""

    def __init__(self, folder: Path) -> None:
        path = save_chat_model(folder / "model")
        self.config = ActorRolloutRefConfig()
        self.config.model.path = str(path)
        self.config.rollout.name = "hf"
        limits = FleetLimits(restarts=2, update_s=WAIT_S, patience_s=WAIT_S)  # a publication waits for every replica
        self.options = ServiceOptions(counts=(2,), log_dir=str(folder / "logs"), run_folder=folder, limits=limits)
        self.service = RolloutService(self.config, RUNTIME, self.options)
        self.service._server = Paced
        self.service.start()
        self.trainer = PlainTrainEngine(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
        self.writer = WeightWriter(self.trainer, self.service.folder, bucket_bytes=1 << 20)
        self.version = -1
        self.fingerprint = ""

    def publish(self) -> dict[str, UpdateReport]:
        """Changed weights to all replicas."""
        self.version += 1
        self.trainer.perturb(self.version)
        self.fingerprint = self.writer.write(self.version).fingerprint
        return dict(self.service.publish(str(self.service.folder), self.version))

    def submit(self, seed: int, *, session: str = "", follow: Follow | None = None) -> Future[Completion]:
        request = GenerationRequest(prompt_ids=[5, 6, 7], seed=seed, session=session)
        return asyncio.run_coroutine_threadsafe(self.service.router.agenerate(request, SAMPLING, follow), self.service.loop)

    def statuses(self) -> dict[str, ReplicaStatus]:
        """Of all replicas, asked of themselves."""
        return self.ask("status")

    def limit(self, limit: int | None) -> None:
        """No request gets more tokens than these; what is in work then stays so, however slow this process is."""
        self.ask("set_pace", limit)

    def ask(self, method: str, *args: Any) -> dict[str, Any]:
        """All replicas that live."""

        async def ask() -> dict[str, Any]:
            answers = {}
            for replica in list(self.service.router.fleet.replicas.values()):
                with suppress(WorkerDiedError):
                    answers[replica.name] = await replica.actor.call(method, *args)
            return answers

        return asyncio.run_coroutine_threadsafe(ask(), self.service.loop).result(WAIT_S)


@pytest.fixture(scope="module")
def job(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    job = Job(tmp_path_factory.mktemp("service"))
    job.publish()
    yield job
    job.service.close()


def until(condition: Callable[[], bool], seconds: float = WAIT_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


def results(futures: list[Future[Completion]]) -> list[Completion]:
    return [future.result(WAIT_S) for future in futures]


def assert_alike(job: Job, completions: list[Completion], undisturbed: list[Completion]) -> None:
    """Most rows have the tokens of undisturbed requests: sums differ in their last bit with the number of requests in a step,
    and a draw that falls on such a bit takes the next token.  The log-probs are always those of the newest weights."""
    different = [
        seed for seed, pair in enumerate(zip(completions, undisturbed, strict=True)) if pair[0].token_ids != pair[1].token_ids
    ]
    assert len(different) <= len(completions) // 3, f"requests {different} have other tokens"
    for done in completions:
        assert len(done.token_ids) == NEW_TOKENS
        with torch.no_grad():
            logits = job.trainer.model(torch.tensor([[5, 6, 7, *done.token_ids]])).logits[0, 2:-1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(done.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.log_probs), expected, rtol=0, atol=1e-2)


def test_weights_are_published_while_requests_run(job: Job) -> None:
    before = job.version
    job.limit(0)
    futures = [job.submit(seed) for seed in range(6)]
    reports = []
    for limit in (20, 40):
        job.limit(limit)
        until(lambda: set(job.ask("furthest").values()) == {limit})  # noqa: B023  it is called at once
        reports.append(job.publish())
    job.limit(None)
    completions = results(futures)
    for completion in completions:
        assert len(completion.token_ids) == len(completion.versions) == len(completion.log_probs) == NEW_TOKENS
        assert completion.versions == sorted(completion.versions)
    assert max(len(set(completion.versions)) for completion in completions) == 3, "updated in the middle of requests"
    assert {version for completion in completions for version in completion.versions} <= {before, before + 1, before + 2}
    for update in reports:
        assert set(update) == {"rollout-0", "rollout-1"}
        assert all(0 < report.pause_s < report.read_s for report in update.values())
    assert {(status.version, status.fingerprint) for status in job.statuses().values()} == {(job.version, job.fingerprint)}
    metrics = job.service.metrics()
    assert 0 < metrics["rollout/pause_s"] <= metrics["rollout/pause_s_max"] < metrics["rollout/update_s"]


def test_a_killed_replica_loses_no_request_and_comes_back_with_the_newest_weights(job: Job) -> None:
    undisturbed = results([job.submit(seed) for seed in range(4)])
    victim = job.statuses()["rollout-0"]
    told: list[list[int]] = [[], []]
    follows = [lambda progress, own=own: own.extend(progress.token_ids) for own in told]
    job.limit(0)
    futures = [job.submit(seed, follow=follow) for seed, follow in enumerate([*follows, None, None])]
    until(lambda: [status.load for status in job.statuses().values()] == [2, 2])  # none comes when others are held already
    job.limit(20)
    until(lambda: min(map(len, told)) > 2)
    time.sleep(0.2)  # what is lost is estimated from the time
    assert not any(future.done() for future in futures)
    os.kill(victim.pid, signal.SIGKILL)
    job.limit(None)
    completions = results(futures)
    assert_alike(job, completions, undisturbed)
    assert all(done.token_ids[: len(own)] == own for done, own in zip(completions, told, strict=False))
    assert [len(done.versions) for done in completions] == [NEW_TOKENS] * 4
    metrics = job.service.metrics()
    assert metrics["rollout/retries"] >= 1 and metrics["rollout/lost_tokens"] >= 1
    published = job.publish()  # while it starts again: nobody waits for it
    assert "rollout-1" in published
    until(lambda: job.service.metrics()["rollout/replicas"] == 2)
    fresh = job.statuses()["rollout-0"]
    assert fresh.pid != victim.pid and fresh.num_requests == 0
    assert (fresh.version, fresh.fingerprint) == (job.version, job.fingerprint), "read before it served"
    assert job.service.metrics()["rollout/replica_restarts"] == 1


def test_sessions_stay_until_their_replica_is_removed(job: Job) -> None:
    def served() -> dict[str, int]:
        return {name: status.num_requests for name, status in job.statuses().items()}

    def growth(session: str) -> list[str]:
        start = served()
        for seed in range(3):
            job.submit(seed, session=session).result(WAIT_S)
        return [name for name, count in served().items() if count > start.get(name, 0)]

    (home,) = growth("conversation")
    assert growth("conversation") == [home]
    job.service.remove(home)
    (other,) = growth("conversation")
    assert other != home and job.service.metrics()["rollout/replicas"] == 1


class Skips(Paced):
    """A joiner that claims the newest weights and holds older ones."""

    async def update_weights(self, folder: str, version: int) -> UpdateReport:
        return replace(await super().update_weights(folder, version - 1), version=version)


def test_a_joiner_that_does_not_read_the_newest_weights_never_serves(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.publish()
    with monkeypatch.context() as patch:
        patch.setattr(job.service, "_server", Skips)
        with pytest.raises(WeightMismatchError, match=f"was to take version {job.version}"):
            job.service.add()
    assert len(job.statuses()) == 1, "the test before has removed one"
    job.service.add()
    assert sorted(job.statuses()) == ["rollout-0", "rollout-1"], "its place is free again"
    assert {status.fingerprint for status in job.statuses().values()} == {job.fingerprint}


def test_the_actor_writes_its_weights_for_the_service(job: Job) -> None:
    assert registered_methods(ActorWorker)["write_weights"].deadline == "sync"
    job.version += 1
    with launch(
        {"actor": ClassWithInitArgs(ActorWorker, job.config, RUNTIME, train=False)}, LaunchOptions(backend="local")
    ) as launched:
        actor: Any = launched.groups["actor"]
        actor.init_model()
        (written,) = actor.write_weights(str(job.service.folder), job.version)
        (place,) = actor.device_places()
    assert place.device == ""
    reports = dict(job.service.publish(str(job.service.folder), job.version))
    assert {report.fingerprint for report in reports.values()} == {written.fingerprint} and len(reports) == 2


def on_loop(job: Job, work: Callable[[], Any]) -> Any:
    """Call it on the service's loop."""

    async def call() -> Any:
        return work()

    return asyncio.run_coroutine_threadsafe(call(), job.service.loop).result(WAIT_S)


def versions(completions: list[Completion]) -> Counter[int]:
    return Counter(version for completion in completions for version in completion.versions)


def test_a_replica_that_is_added_in_mid_run_serves_nothing_but_the_newest_weights(job: Job) -> None:
    """Weights are published while it starts; requests run all the time, and the tokens of later ones are counted by version."""
    job.limit(0)
    running = [job.submit(seed) for seed in range(4)]
    change = on_loop(job, lambda: job.service.control.begin_add("more"))
    before = job.version
    while change.state == "running":
        job.publish()
        # Hundreds of changes would make the weights so large that rounding decides the tokens, however long it takes.
        time.sleep(0.25 * (job.version - before))
    assert (change.state, change.replica) == ("done", "rollout-2") and job.version > before
    assert job.statuses()["rollout-2"].version == job.version
    later = [job.submit(seed) for seed in range(9)]
    job.limit(None)
    assert versions(results(later)) == {job.version: 9 * NEW_TOKENS}
    assert sum(versions(results(running)).values()) == 4 * NEW_TOKENS
    assert job.statuses()["rollout-2"].num_tokens >= 2 * NEW_TOKENS, "it has served its share"


def test_a_removed_replica_completes_its_requests(job: Job) -> None:
    undisturbed = results([job.submit(seed) for seed in range(6)])
    counts = dict(job.service.router.counts)
    job.limit(0)
    running = [job.submit(seed) for seed in range(6)]
    until(lambda: [status.load for status in job.statuses().values()] == [2, 2, 2])
    change = on_loop(job, lambda: job.service.control.begin_remove("rollout-0", "enough"))
    time.sleep(0.2)
    assert change.state == "running" and not any(future.done() for future in running)
    late = [job.submit(seed) for seed in range(6)]
    job.limit(None)
    assert_alike(job, results(running), undisturbed)
    assert_alike(job, results(late), undisturbed)
    until(lambda: change.state == "done")
    assert sorted(job.statuses()) == ["rollout-1", "rollout-2"]
    grown = {name: job.service.router.counts[name] - counts.get(name, 0) for name in ("requests", "completed", "retries")}
    assert grown == {"requests": 12, "completed": 12, "retries": 0}, "each was answered once, by the replica that had it"


class NeverStarts(Paced):
    """A joiner that is always still starting."""

    async def start(self) -> None:
        await super().start()
        await asyncio.sleep(3600)


def test_a_replica_that_is_killed_while_it_is_added_frees_its_place(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.limit(0)
    running = [job.submit(seed) for seed in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(job.service, "_server", NeverStarts)
        change = on_loop(job, lambda: job.service.control.begin_add("more"))
        until(lambda: bool(job.service.router.fleet._joining))
    (actor,) = job.service.router.fleet._joining
    status = asyncio.run_coroutine_threadsafe(actor.call("status"), job.service.loop).result(WAIT_S)
    os.kill(status.pid, signal.SIGKILL)
    until(lambda: change.state == "failed")
    assert isinstance(change.failure, WorkerDiedError) and change.replica == "rollout-0"
    assert sorted(job.statuses()) == ["rollout-1", "rollout-2"]
    job.limit(None)
    assert sum(versions(results(running)).values()) == 4 * NEW_TOKENS
    assert job.service.add() == "rollout-0", "its name and its place are free"
    job.service.remove("rollout-2")
    assert {status.version for status in job.statuses().values()} == {job.version}


def test_closing_leaves_no_process_and_no_weights(job: Job) -> None:
    pids, folder = [status.pid for status in job.statuses().values()], job.service.folder
    assert folder.is_relative_to(SHARED_MEMORY) and folder.exists()
    job.limit(0)
    waiting = job.submit(1)
    job.service.close()
    job.service.close()
    with pytest.raises(EngineError):
        waiting.result(WAIT_S)
    until(lambda: not any(map(psutil.pid_exists, pids)))
    assert not list(folder.parent.glob(f"{folder.name}*"))
