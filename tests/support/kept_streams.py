"""A stream of episodes whose tokens stay in episode actors until ranks get them, without a model; the same for every backend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhub.agents.remote.episode_actor import EpisodeActorSettings, WorkflowKey
from rlhub.agents.remote.holders import Holders, KeepingWorkflow
from rlhub.agents.remote.workflow import EpisodeActorOptions, EpisodeActors, RemoteWorkflow, episode_actor_starter
from rlhub.agents.trajectory import NOT_SAMPLED, Episode, Sampled, Trajectory
from rlhub.agents.trajectory import rows_of as rows_of_sample
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow, build_workflow
from rlhub.config.sections.ppo import PPOConfig
from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.models.tokenizer import Vocabulary
from rlhub.protocol import BatchRef, DataProto
from rlhub.rollout_service.executor.batches import keep_nothing
from rlhub.rollout_service.executor.episode_groups import Group
from rlhub.rollout_service.executor.ledger import PromptLedger
from rlhub.rollout_service.executor.staleness import StalenessManager
from rlhub.single_controller import WorkerGroup
from rlhub.single_controller.resources import Backend
from rlhub.trainer.ppo.dealing import Dealing
from rlhub.trainer.ppo.episode_scoring import OutcomeStore
from rlhub.trainer.ppo.stream_source import PromptLog, StreamSource
from rlhub.utils.timing import PhaseTimer
from tests.support.episodes import executing, parts
from tests.unit.trainer.ppo.test_stream_source import FakePublisher
from tests.unit.trainer.ppo.test_stream_source_prompts import loader

BATCH, SAMPLES, SAMPLING = 4, 2, SamplingParams(max_new_tokens=8)
WORKFLOW, BRANCHES, FAILING, TOOLS = (f"{__name__}:{name}" for name in ("TwoTurns", "Branches", "Failing", "Tools"))


class TwoTurns(RolloutWorkflow):
    """Between two generations stands a token that the policy did not write."""

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Sampled | None:
        one = await engine.agenerate(self.request(data), SAMPLING)
        two = await engine.agenerate(self.request(data), SAMPLING)
        mask = [1] * len(one.token_ids) + [0] + [1] * len(two.token_ids)
        return Trajectory(
            prompt_ids=list(data.prompt_ids),
            response_ids=[*one.token_ids, 1, *two.token_ids],
            response_mask=mask,
            rollout_log_probs=[*one.log_probs, 0.0, *two.log_probs],
            versions=[*one.versions, NOT_SAMPLED, *two.versions],
            metrics={"turns": 2.0},
        )


class Branches(TwoTurns):
    """One to three conversations, of which the later ones mask what they share with the first and have a reward of their own.

    Every episode generates three, so that groups end in their order.
    """

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Sampled | None:
        rows = []
        for branch in range(3):
            row = await super().arun_episode(engine, replace(data, seed=data.seed + branch))
            assert isinstance(row, Trajectory)
            rows.append(row)
            if branch:
                row.response_mask[0], row.versions[0], row.rollout_log_probs[0] = 0, NOT_SAMPLED, 0.0
            row.set_reward(float(branch))
            row.comparison = "first" if not branch else "later"
        chosen = rows[: 1 + data.seed % 3]
        return Episode(trajectories=chosen, metrics={"branches": float(len(chosen))})


class Tools(TwoTurns):
    """A tool rewards the first turn of every other episode; the run's reward function scores all of them."""

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Sampled | None:
        row = await super().arun_episode(engine, data)
        assert isinstance(row, Trajectory)
        if data.sample % 2 == 0:
            row.added_rewards = [0.1 * (data.ordinal + 1), *[0.0] * (len(row.response_ids) - 2), 0.7]
        return row


class Failing(Branches):
    """A third of the attempts fails, after all of their tokens."""

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Sampled | None:
        episode = await super().arun_episode(engine, data)
        if data.seed // 7 % 3 == 0:
            raise OSError("the tool fell over")
        return episode


class Seeded:
    """An engine whose tokens follow from the seed, of a number that differs between prompts."""

    def __init__(self) -> None:
        self.version = 0

    async def agenerate(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        length = 1 + request.seed % 5
        tokens = [(request.seed + place) % 90 + 2 for place in range(length)]
        return Completion(token_ids=tokens, log_probs=[-0.1] * length, finish_reason="stop", versions=[self.version] * length)


@dataclass(slots=True)
class Stream:
    """A source of batches, and what it is made of.  holders: None where the driver has the tokens."""

    source: StreamSource
    holders: Holders | None
    pool: EpisodeActors | None
    prompts: Iterator[DataProto]

    def step(self, step: int) -> list[tuple[int, list[int], list[bool], list[float]]]:
        """Goes through a training step; returns each row's ordinal, tokens, mask and log-probs."""
        self.settle()
        self.source.publish()
        batch = self.source.sample(self.prompts, step).batch
        assert isinstance(batch, BatchRef) == (self.holders is not None)
        found = rows_of(batch)
        if isinstance(batch, BatchRef):
            batch.drop()
        self.source.trained(step)
        return found

    def on_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.source.executor.runner.loop).result(240)

    def kept(self) -> tuple[int, int]:
        """Returns the rows in the stores, and those of finished groups that are not trained; no episode runs."""
        assert self.holders is not None
        self.settle()
        sizes = self.on_loop(self.holders.sizes())
        untrained = self.source.executor.delivery.untrained()
        return sum(rows for rows, _ in sizes.values()), sum(
            len(rows_of_sample(sample)) for group in untrained for sample in group.scored
        )

    def _tasks_but(self, *names: str) -> list[Any]:
        tasks = [] if self.pool is None else list(self.pool._tasks)
        return [task for task in tasks if task.get_coro().__name__ not in names]  # type: ignore[union-attr]

    def settle(self) -> None:
        """Waits until all that may start has ended and what is dropped is gone."""
        executor = self.source.executor

        async def idle() -> None:
            lasting = ("_watch", "_receive")  # a call for reports may stay open when the last episode has ended
            while executor._work or executor._episodes or self._tasks_but(*lasting):
                await asyncio.sleep(0.01)

        self.on_loop(idle())


def rows_of(batch: Any) -> list[tuple[int, list[int], list[bool], list[float]]]:
    rows = batch.fetch_all() if isinstance(batch, BatchRef) else batch
    columns = rows.batch
    lengths, ordinals = columns["response_length"].tolist(), columns["ordinal"].tolist()
    return [
        (
            ordinal,
            columns["input_ids"][row][columns["attention_mask"][row].bool()].tolist(),
            columns["response_mask"][row, :length].bool().tolist(),
            columns["rollout_log_probs"][row, :length].tolist(),
        )
        for row, (ordinal, length) in enumerate(zip(ordinals, lengths, strict=True))
    ]


def make_tokenizer() -> Callable[[list[int]], str]:
    return str


@contextmanager
def streaming(
    folder: Path,
    ranks: WorkerGroup | None,
    *,
    backend: Backend = "local",
    num_actors: int = 2,
    max_staleness: int = 1,
    policy: Any = None,
    name: str = WORKFLOW,
    **limits: int,
) -> Iterator[Stream]:
    """ranks: those that train; None: trainer.batches=driver.  limits: further options of the executor."""
    config, engine, log = PPOConfig(), policy or Seeded(), PromptLog(folder / "prompts.jsonl")
    config.data.train_batch_size, config.trainer.max_staleness = BATCH, max_staleness
    config.actor_rollout_ref.rollout.n, config.actor_rollout_ref.actor.ppo_mini_batch_size = SAMPLES, BATCH // 2
    staleness, ledger = StalenessManager(batch=BATCH, max_staleness=max_staleness), PromptLedger(on_end=log.ended)
    settings = EpisodeActorSettings(
        tokenizer=make_tokenizer, samplings={"training": SAMPLING}, max_prompt_length=8, max_response_length=16, vocab_size=100
    )
    pool = holders = None
    workflow: RolloutWorkflow = build_workflow(name, parts())
    if ranks is not None:
        if num_actors:
            options = EpisodeActorOptions(backend=backend, log_dir=str(folder / "logs") if backend == "ray" else None)
            pool = EpisodeActors(episode_actor_starter(settings, options), num_actors)
        holders = Holders(pool, vocab_size=100)
        remote = None if pool is None else RemoteWorkflow(parts(), WorkflowKey("training", name), pool, keeps=True)
        workflow = KeepingWorkflow(name, holders.own, remote, lambda: build_workflow(name, parts()))
    release = keep_nothing if holders is None else holders.release
    options_: Any = {"staleness": staleness, "ledger": ledger, "group_size": SAMPLES, "release": release} | limits
    with executing(workflow, engine=engine, **options_) as executor:
        source = StreamSource(
            config=config,
            loader=loader(),  # type: ignore[arg-type]
            executor=executor,
            publisher=FakePublisher(engine),  # type: ignore[arg-type]
            outcomes=OutcomeStore(),
            vocabulary=Vocabulary(size=100, stop_token_ids=(), pad_id=0),
            log=log,
            timers=PhaseTimer(),
            holders=holders,
            ranks=ranks,
            dealing=Dealing.between(config, ranks, None) if ranks is not None else None,
        )
        stream = Stream(source, holders, pool, source.loader.endless())
        take = executor.next_groups

        def next_groups(*args: Any, **kwargs: Any) -> list[Group]:
            stream.settle()  # else which groups a step takes depends on which process was faster
            return take(*args, **kwargs)

        executor.next_groups = next_groups  # type: ignore[method-assign]
        if pool is not None:
            stream.on_loop(pool.start())
            pool.on_lost = executor.lost
        try:
            yield stream
        finally:
            executor.close()
            if pool is not None:
                stream.on_loop(pool.close())


def trained_rows(folder: Path, steps: int, **options: Any) -> list[Any]:
    """The rows of each step of a run in which the driver has all tokens."""
    folder.mkdir()
    with streaming(folder, None, **options) as stream:
        return [stream.step(step) for step in range(1, steps + 1)]
