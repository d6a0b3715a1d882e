"""What the fuzz of asynchronous episodes is made of: episodes that do everything wrong now and then, and files for the audit.

Chance is a function of (seed, ordinal, sample), so a resumed run meets what the killed one would have met.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhub.agents.trajectory import Trajectory
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine
from rlhub.agents.workflows.turns import SingleTurn
from rlhub.engines.rollout.base import Completion, Follow, GenerationRequest, SamplingParams
from rlhub.engines.rollout.fake import FakeEngine
from rlhub.engines.rollout.registry import ROLLOUT_ENGINES, RolloutSetup
from rlhub.rollout_service.executor.episode_groups import Group, PromptItem
from rlhub.rollout_service.executor.ledger import Phase, PromptLedger
from rlhub.rollout_service.fleet import Fleet
from rlhub.rollout_service.replica import Replica
from rlhub.rollout_service.router import Router
from rlhub.utils.aio.results import Reject
from tests.support.audit import TrainedGroup, audit

FUZZ_ENGINE = "fuzz"
STEP_S = 0.001
FAIL, NOTHING, REJECT, HANG, FILTER = 0.15, 0.02, 0.01, 0.002, 0.05
"""Shares of the attempts that raise, return None, raise Reject, never end; of the groups that the filter turns down."""


def slow_engine(setup: RolloutSetup) -> FakeEngine:
    """The fake engine, a token a step."""
    return FakeEngine(setup, step_s=STEP_S)


if FUZZ_ENGINE not in ROLLOUT_ENGINES:
    ROLLOUT_ENGINES.register(FUZZ_ENGINE)(slow_engine)


def chance(*keys: object) -> random.Random:
    """Random numbers of these keys alone."""
    return random.Random(repr(keys))


class Erratic(SingleTurn):
    """One generation, before and after which it waits as an agent waits for tools: spread 1:20, with a long tail."""

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory | None:
        seed, mean_s = self.parts.kwargs["seed"], self.parts.kwargs["mean_s"]
        drawn = chance(seed, data.ordinal, data.sample, data.seed)
        fate = drawn.random()
        await asyncio.sleep(mean_s * drawn.uniform(0.1, 1.0))
        if fate < FAIL:
            raise RuntimeError("the tool failed")
        if fate < FAIL + NOTHING:
            return None
        if fate < FAIL + NOTHING + REJECT:
            raise Reject("nothing to learn from")
        if fate < FAIL + NOTHING + REJECT + HANG:
            await asyncio.sleep(3600)
        trajectory = await super().arun_episode(engine, data)
        await asyncio.sleep(mean_s * (20.0 if drawn.random() < 0.05 else drawn.uniform(0.0, 1.0)))
        return trajectory


def prompts(first: int, stop: Any) -> Iterator[PromptItem]:
    """Endless, until `stop` is set."""
    ordinal = first
    while not stop.is_set():
        yield PromptItem(prompt_ids=(3 + ordinal % 13, 4, 5), ordinal=ordinal, row={"index": ordinal})
        ordinal += 1


def checksum(trajectory: Trajectory) -> int:
    """Of what was generated."""
    return zlib.crc32(repr((trajectory.response_ids, trajectory.versions)).encode())


class Lines:
    """A file that is appended to line by line, each with one write, so that a kill leaves whole lines (or a torn last one)."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def add(self, value: Any) -> None:
        os.write(self._file, (json.dumps(value) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)


def read_lines(path: Path) -> list[Any]:
    if not path.exists():
        return []
    *whole, _ = path.read_text().split("\n")
    return [json.loads(line) for line in whole]


@dataclass
class Records:
    """Files of a run: what the reward function saw, what was trained, how the other prompts ended."""

    folder: Path
    scored: Lines = field(init=False)
    trained: Lines = field(init=False)
    ends: Lines = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.scored, self.trained, self.ends = (Lines(self.folder / f"{name}.jsonl") for name in ("scored", "trained", "ends"))

    async def reward(self, group: Group) -> None:
        """The reward function."""
        for sample, trajectory in enumerate(group.trajectories):
            assert isinstance(trajectory, Trajectory)
            self.scored.add([group.ordinal, sample, checksum(trajectory)])
            trajectory.set_reward(float(trajectory.response_ids[-1] % 2))

    def ended(self, ordinals: Sequence[int], phase: Phase, reason: str) -> None:
        """For the ledger.  Training keeps a record of its own."""
        if phase is not Phase.TRAINED:
            for ordinal in ordinals:
                self.ends.add([ordinal, phase.value, reason])

    def train(self, groups: Sequence[Group], step: int) -> None:
        """What a training step used."""
        for group in groups:
            samples = []
            for trajectory in group.trajectories:
                assert isinstance(trajectory, Trajectory)
                pairs = zip(trajectory.versions, trajectory.response_mask, strict=True)
                samples.append([checksum(trajectory), [version for version, used in pairs if used]])
            self.trained.add([group.ordinal, step, samples])

    def close(self) -> None:
        for lines in (self.scored, self.trained, self.ends):
            lines.close()


ENDS = ("trained", "rejected", "dropped")


def take_back(folder: Path, counts: dict[str, int], next_ordinal: int) -> None:
    """Forget what came after the checkpoint whose ledger counted so many ends and had drawn so many prompts: for the resumed run
    it did not happen.  What the reward function saw of prompts that were drawn by then stays."""
    path = folder / "scored.jsonl"
    if path.exists():
        path.write_text("".join(f"{json.dumps(line)}\n" for line in read_lines(path) if line[0] < next_ordinal))
    kept = {"trained": counts["trained"], "ends": counts["rejected"] + counts["dropped"]}
    for name, count in kept.items():
        path = folder / f"{name}.jsonl"
        if path.exists():
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))


def findings(folder: Path, ledger: PromptLedger, bound: int) -> list[str]:
    """The audit of the files, and whether what was trained is what was scored."""
    scored = [tuple(line) for line in read_lines(folder / "scored.jsonl")]
    trained = read_lines(folder / "trained.jsonl")
    ends = read_lines(folder / "ends.jsonl")
    groups = [
        TrainedGroup(ordinal=ordinal, step=step, versions=[versions for _, versions in samples])
        for ordinal, step, samples in trained
    ]
    problems = audit(
        trained=groups,
        dropped=[ordinal for ordinal, phase, _ in ends if phase == Phase.DROPPED],
        rejected=[ordinal for ordinal, phase, _ in ends if phase == Phase.REJECTED],
        unended=ledger.in_phase(*Phase),
        next_ordinal=ledger.next_ordinal,
        scored={ordinal for ordinal, _, _ in scored},
        bound=bound,
    )
    known = set(scored)
    other = [o for o, _, samples in trained for sample, (crc, _) in enumerate(samples) if (o, sample, crc) not in known]
    if other:
        problems.append(f"{len(other)} samples were trained that the reward function never saw, such as of prompt {other[0]}")
    return problems


@dataclass
class Footprint:
    """Memory and tasks at two moments of a run, for leaks."""

    rss_mb: float
    tasks: int
    files: int
    at: float = field(default_factory=time.monotonic)


class Witness:
    """The router as episodes see it, and what it must never do: fail a request, cut it short unasked, or answer with weights
    older than those that all replicas had when it was asked."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.settled = -1  # version of the newest publication that has returned
        self.interrupted: set[str] = set()
        self.failed: list[str] = []
        self.cut: list[str] = []
        self.stale: list[str] = []
        self.by_version: dict[int, int] = {}

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        settled = self.settled
        try:
            answer = await self.router.agenerate(request, params, follow)
        except Exception as error:
            self.failed.append(f"{type(error).__name__}: {error}")
            raise
        if answer.finish_reason == "abort" and request.request_id not in self.interrupted:
            self.cut.append(request.request_id)
        if answer.versions and min(answer.versions) < settled:
            self.stale.append(f"version {min(answer.versions)}, where all replicas had {settled}")
        for version in answer.versions:
            self.by_version[version] = self.by_version.get(version, 0) + 1
        return answer

    async def interrupt(self, request_ids: Sequence[str]) -> None:
        """For a checkpoint, which wants the tokens of running requests."""
        self.interrupted.update(request_ids)
        await self.router.abort(request_ids)

    def findings(self) -> list[str]:
        """Sentences on what it did."""
        kinds = {"failed": self.failed, "were cut short": self.cut, "got tokens of old weights": self.stale}
        return [f"{len(found)} requests {what}, such as {found[0]}" for what, found in kinds.items() if found]


LATE_S = 0.5


async def serve_stale(fleet: Fleet, replica: Replica) -> None:
    """Broken: a joiner takes the newest weights once, misses those that are published meanwhile, and serves."""
    async with replica.turn:
        goal = fleet.newest
        while goal is not None and replica.publication < goal.number and not replica.pins:
            await fleet._take(replica, goal)
            if replica.state != "fresh":
                goal = fleet.newest
        if replica.state == "fresh" and fleet.newest is not None:
            await asyncio.sleep(LATE_S)
            replica.publication, replica.state = fleet.newest.number, "serving"
    fleet._notify()


async def drop_requests(fleet: Fleet, name: str) -> None:
    """Broken: a replica that leaves ends its requests with the tokens that they have."""
    replica = fleet._find(name)
    replica.state = "leaving"
    await replica.actor.call("abort", None)
    await fleet._drained(replica)
    await fleet._end(replica)


BROKEN = {"stale": ("_take_newest", serve_stale), "drops": ("remove", drop_requests)}
"""Replacements of methods of Fleet, with which the audit must find something."""
