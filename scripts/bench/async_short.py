"""Episodes of a tenth of a second beside training of a tenth of a second: what the way between them costs.

Everything of a step is real but generation and the training itself, which take exactly their time: the executor, the rollout
service with a replica, scoring in the reward function's process, the batch, and weights written to the folder and read.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlhub.agents.trajectory import Trajectory
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow, WorkflowParts
from rlhub.config.rules.derive import derive
from rlhub.config.sections.ppo import PPOConfig
from rlhub.models.tokenizer import Vocabulary
from rlhub.protocol import DataProto
from rlhub.protocol.columns import object_array
from rlhub.rewards import build_reward_manager
from rlhub.rewards.rows import RowScorer
from rlhub.rollout_service.executor.executor import ExecutorOptions, WorkflowExecutor
from rlhub.rollout_service.executor.ledger import PromptLedger
from rlhub.rollout_service.executor.staleness import StalenessManager
from rlhub.rollout_service.service import RolloutService, ServiceOptions
from rlhub.sharding_manager.route import SyncReport
from rlhub.trainer.ppo.episode_scoring import GroupScoring, OutcomeStore, function_manager
from rlhub.trainer.ppo.publication import Publisher
from rlhub.trainer.ppo.scoring import build_scorer
from rlhub.trainer.ppo.stream_source import PromptLog, StreamSource
from rlhub.utils.aio.task_runner import AsyncTaskRunner
from rlhub.utils.collector import heap_set_aside
from rlhub.utils.timing import PhaseTimer
from tests.support.rollout_service import RUNTIME, Weights, fake_config, sampling

BATCH, SAMPLES, STEPS, WARM_UP = 16, 2, 60, 10
PROMPT = 4
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) % 7\n"


class Waits(RolloutWorkflow):
    """One generation of the fake engine, which is there at once, and then a wait."""

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory:
        started = time.monotonic()
        completion = await engine.agenerate(self.request(data), self.parts.sampling)
        await asyncio.sleep(max(self.parts.kwargs["seconds"] - (time.monotonic() - started), 0))
        return Trajectory(
            prompt_ids=list(data.prompt_ids),
            response_ids=completion.token_ids,
            response_mask=[1] * len(completion.token_ids),
            rollout_log_probs=completion.log_probs,
            versions=completion.versions,
        )


class Words:
    """A tokenizer of sorts."""

    def batch_decode(self, sequences: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        return [" ".join(map(str, ids)) for ids in sequences]


class Numbers:
    """A loader of sorts: prompts without end."""

    epoch = 0

    def state(self) -> dict[str, Any]:
        return {}

    def batches(self) -> Iterator[DataProto]:
        first = 0
        while True:
            ordinals = torch.arange(first, first + BATCH)
            columns = {"prompts": torch.full((BATCH, PROMPT), 3), "attention_mask": torch.ones(BATCH, PROMPT, dtype=torch.long)}
            texts = {name: object_array([name] * BATCH) for name in ("data_source", "ground_truth", "extra_info")}
            yield DataProto.from_dict(columns | {"ordinal": ordinals}, texts)
            first += BATCH


def config_of(staleness: int, reward: Path) -> PPOConfig:
    config = PPOConfig()
    config.data.train_batch_size, config.actor_rollout_ref.rollout.n = BATCH, SAMPLES
    config.trainer.max_staleness = staleness
    config.custom_reward_function.path = str(reward)
    config.reward_model.num_workers = 1
    derive(config)
    return config


@dataclass(slots=True, kw_only=True)
class Step:
    """Means of a step after the warm-up.  seconds: by the clock.  cpu_s: what the training thread computed in it beside training,
    which is what is left of the difference on a machine that has nothing else to do.  process_cpu_s: of all threads."""

    seconds: float
    cpu_s: float
    process_cpu_s: float


def measure_step(staleness: int, episode_s: float, training_s: float) -> Step:
    """Runs the loop."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "reward.py").write_text(REWARD)
        context = stream_of(config_of(staleness, folder / "reward.py"), folder, episode_s)
        stream = stack.enter_context(context)
        prompts, started = Numbers().batches(), (0.0, 0.0, 0.0)
        for step in range(1, STEPS + 1):
            if step == WARM_UP + 1:
                started = clocks()
            stream.publish()
            samples = stream.sample(prompts, step)
            context.score.submit(samples).add_to(samples.batch)
            stream.select(samples)
            train(context.weights, step, training_s)
            stream.trained(step)
        stream.publisher.wait()
        seconds, cpu, process_cpu = ((end - start) / (STEPS - WARM_UP) for start, end in zip(started, clocks(), strict=True))
        return Step(seconds=seconds, cpu_s=cpu, process_cpu_s=process_cpu)


def train(weights: Weights, step: int, seconds: float) -> None:
    """Other weights, after exactly so long."""
    ended = time.perf_counter() + seconds
    weights.engine.perturb(step)
    time.sleep(max(ended - time.perf_counter(), 0))


def clocks() -> tuple[float, float, float]:
    """Wall, this thread's CPU, this process's CPU, in seconds."""
    return time.perf_counter(), time.thread_time(), time.process_time()


class stream_of(ExitStack):  # noqa: N801  used as a function that gives a context
    """A stream over one fake replica in this process."""

    def __init__(self, config: PPOConfig, folder: Path, episode_s: float) -> None:
        super().__init__()
        self.config, self.folder, self.episode_s = config, folder, episode_s

    def __enter__(self) -> Any:
        super().__enter__()
        config, timers = self.config, PhaseTimer()
        reward = build_reward_manager(config.reward_model, config.custom_reward_function, Words(), RUNTIME.max_response_length)
        self.callback(reward.close)
        runner = AsyncTaskRunner(name="episodes")
        self.callback(runner.close)
        options = ServiceOptions(backend="local", run_folder=self.folder)
        service = RolloutService(fake_config(), RUNTIME, options, loop=runner.loop)
        self.callback(service.close)
        service.start()
        self.weights = Weights(service.folder)
        manager, log = function_manager(reward), PromptLog(self.folder / "prompts.jsonl")
        assert manager is not None
        scorer = RowScorer(manager.parts.pool, manager.parts.tokenizer)
        scoring = GroupScoring(scorer, OutcomeStore())
        parts = WorkflowParts(
            tokenizer=None,
            sampling=sampling(8),
            max_prompt_length=PROMPT,
            max_response_length=8,
            score=scorer.score_text,
            kwargs={"seconds": self.episode_s},
        )
        workflow = Waits(parts)
        executor = WorkflowExecutor(
            runner=runner,
            engine=service.router,
            workflow_for=lambda row: workflow,
            staleness=StalenessManager(batch=BATCH, max_staleness=config.trainer.max_staleness),
            ledger=PromptLedger(on_end=log.ended),
            options=ExecutorOptions(group_size=SAMPLES),
            on_group=scoring,
        )
        self.callback(executor.close)
        publisher = Publisher(
            service.router,
            service.loop,
            str(service.folder),
            write=self.write,
            fail=executor.fail,
            timers=timers,
        )
        self.callback(publisher.close)
        stream = StreamSource(
            config=config,
            loader=Numbers(),  # type: ignore[arg-type]
            executor=executor,
            publisher=publisher,
            outcomes=scoring.outcomes,
            vocabulary=Vocabulary(size=1 << 16, stop_token_ids=(), pad_id=0),
            log=log,
            timers=timers,
        )
        self.score = build_scorer(config, reward, timers)
        self.enter_context(heap_set_aside())
        return stream

    def write(self, folder: str, version: int) -> list[SyncReport]:
        self.weights.write_unchanged(version)
        return []


if __name__ == "__main__":
    for bound in (0, 1, 4):
        print(f"max_staleness={bound}: {measure_step(bound, 0.1, 0.1)}")
