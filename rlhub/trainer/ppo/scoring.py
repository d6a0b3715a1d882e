"""Scores of sampled responses: the reward of each row, that of the greedy responses they are compared with, and the numbers of
the reward that an estimator or the group filter reads.

The training step scores every response once, wherever it was sampled.  A reward function may have judged a finished episode
before (episode_scoring.py): then the batch carries what it returned, and only what is made of it for the batch is left.

The reward itself is put together here too: the processes of the reward function, the roles that score with models, and one
manager over all of them (`RewardParts`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import ConfigError, RewardError
from rlhub.models.shape import ModelShape, read_model_shape
from rlhub.models.tokenizer import load_tokenizer
from rlhub.protocol import Batch, BatchRef, DataProto
from rlhub.registry import suggest
from rlhub.rewards import RewardManager, RewardResult, build_reward_manager
from rlhub.rewards.base import FAILED
from rlhub.rewards.combine import JUDGE, MODEL, CombinedManager, Judge, PartScores, RewardPart, outcomes_of
from rlhub.rewards.rendering import Rendering, padded
from rlhub.rollout_service.executor.batches import ADDED, add_rewards
from rlhub.single_controller import ClassWithInitArgs, WorkerGroup
from rlhub.trainer.ppo.requirements import NAMES_OF_THE_REWARD, requirements
from rlhub.trainer.ppo.validation_metrics import correctness
from rlhub.utils.timing import PhaseTimer
from rlhub.workers.memory_handover import WorkerRuntime
from rlhub.workers.roles import JudgeWorker, RewardModelWorker

logger = logging.getLogger(__name__)


COMPONENT = "reward/"
"""Prefix of the columns that hold the scorer's own numbers."""
SIGNAL = "group_metric"
"""Column (rows,) float64: the number in which the samples of a group are compared."""
COUNTS = FAILED
"""Metrics that add up over several scorings; other numbers of the scorer are averaged."""


@dataclass(slots=True, kw_only=True)
class Samples:
    """Holds what a source has sampled.

    batch: the samples of each prompt side by side.  greedy: the most likely response to each of these prompts, in their order;
    None where no estimator compares with it.
    """

    batch: Batch
    greedy: Batch | None = None


@dataclass(slots=True, kw_only=True)
class Scorer:
    """Scores samples, and the greedy responses to their prompts where there are any.

    components: also keeps every number of its own that the reward returns, as columns `reward/<name>` (rows,) float64.
    metric: also keeps that number of each sample, as column `group_metric`; None where no samples are compared.
    """

    reward: RewardManager
    timers: PhaseTimer
    components: bool = False
    metric: str | None = None

    def __call__(self, samples: Samples) -> dict[str, float]:
        """Adds the scores to the samples, with greedy responses also baseline_rewards; returns the metrics of scoring."""
        metrics = dict(self.score_rows(samples.batch))
        if samples.greedy is not None:
            compared = self.score_rows(samples.greedy)
            metrics |= {name: value + metrics.get(name, 0.0) for name, value in compared.items() if name.startswith(COUNTS)}
            metrics |= add_baseline(samples.batch, samples.greedy)
            if isinstance(samples.greedy, BatchRef):
                samples.greedy.drop()
        return metrics

    def score_rows(self, batch: Batch) -> dict[str, float]:
        """Adds token_level_scores (rows, response), scores (rows,) and valid (rows,), and returns the metrics.

        Rows that come with their scores keep them: those of workflows that give rewards themselves, and recorded batches.
        Raises RewardError when more rows fail than the limit allows.
        """
        columns = batch.batch
        if "token_level_scores" in columns.keys():
            return {}
        with self.timers.measure("reward"):
            result = self.reward(with_tokens(batch))
        columns["token_level_scores"] = result.token_level_scores
        columns["scores"] = result.scores
        columns["valid"] = result.valid
        if ADDED in columns.keys():
            add_rewards(columns)
        if self.components:
            for name in numeric_entries(result):
                columns[f"{COMPONENT}{name}"] = component(result, name)
        if self.metric is not None:
            result.scores = columns["scores"]
            columns[SIGNAL] = group_metric(result, self.metric)
        return result.metrics


def with_tokens(batch: Batch) -> DataProto:
    """Returns the batch with the columns that a reward manager reads; by reference they are brought to this process."""
    return batch if isinstance(batch, DataProto) else batch.fetch_all()


def build_scorer(config: PPOConfig, reward: RewardManager, timers: PhaseTimer) -> Scorer:
    """Returns a scorer that keeps what the chosen estimator and the group filter read."""
    groups = config.algorithm.filter_groups
    return Scorer(
        reward=reward,
        timers=timers,
        components=requirements(config).reward_components,
        metric=groups.metric if groups.enable else None,
    )


def add_baseline(batch: Batch, greedy: Batch) -> dict[str, float]:
    """Adds baseline_rewards (rows,): the reward of each prompt's greedy response (Li et al. 2024, arXiv 2310.10505); returns
    their mean as a metric.

    greedy: scored, one row a prompt, in the order in which `batch`, which is scored, has its samples side by side.  Where that
    response has no valid score there is nothing to compare with, and the prompt's samples do not train.
    """
    n = len(batch) // len(greedy)
    scores, valid = greedy.batch["scores"], greedy.batch["valid"]
    batch.batch["baseline_rewards"] = scores.repeat_interleave(n)
    batch.batch["valid"] = batch.batch["valid"] & valid.repeat_interleave(n)
    return {"reward/greedy_mean": scores[valid].double().mean().item()} if bool(valid.any()) else {}


def merge_scorings(scorings: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the metrics of several scorings of equal size: counts add up, the rest is averaged over those that have it."""
    names = dict.fromkeys(name for metrics in scorings for name in metrics)
    values = {name: [metrics[name] for metrics in scorings if name in metrics] for name in names}
    return {name: sum(found) if name.startswith(COUNTS) else sum(found) / len(found) for name, found in values.items()}


def numeric_entries(result: RewardResult) -> list[str]:
    """Returns the names of the extras that are numbers in every row that has them."""
    return [
        name
        for name, column in result.extra.items()
        if all(value is None or isinstance(value, bool | int | float | np.number) for value in column)
    ]


def component(result: RewardResult, name: str) -> Tensor:
    """Returns that number of each row, (rows,) float64; 0 for a row whose scoring failed, which has no entry at all.

    Raises RewardError for a row that was scored and has none, or one that is not finite: whatever stood in for it would be
    learned.
    """
    values, valid = result.extra[name], result.valid.numpy()
    missing = np.array([value is None for value in values], dtype=bool)
    numbers = np.array([0.0 if value is None else float(value) for value in values], dtype=np.float64)
    too_many = missing.sum() > result.metrics.get("reward/num_failed", 0.0)
    bad = (valid & ~np.isfinite(numbers)) | (valid & missing if too_many else False)
    if bad.any():
        row = int(bad.argmax())
        raise RewardError(
            f"row {row}: the reward function returned {'no' if missing[row] else values[row]} {name!r}, which it gives for other "
            f"rows; expected a finite number in every row. Return {name!r} always, 0 where it does not apply."
        )
    return torch.from_numpy(np.where(valid & ~missing, numbers, 0.0))


def group_metric(result: RewardResult, name: str) -> Tensor:
    """Returns the number of each row by which algorithm.filter_groups compares, (rows,) float64.

    Names of the reward give the reward; `acc` falls back on what validation counts as correct; other names are the scorer's.
    """
    if name in NAMES_OF_THE_REWARD:
        return result.scores.double()
    known = numeric_entries(result)
    if name in known:
        return component(result, name)
    if name == "acc":
        return torch.from_numpy(correctness(result.extra, result.scores.numpy())).double()
    raise RewardError(
        f"algorithm.filter_groups.metric={name}: the reward function returns no such number"
        f"{suggest(name, [*known, *NAMES_OF_THE_REWARD])}; known: seq_reward (the reward itself), acc"
        f"{''.join(f', {other}' for other in known if other != 'acc')}"
    )


REWARD_MODEL_ROLE, JUDGE_ROLE = "reward_model", "judge"


@dataclass(slots=True, kw_only=True)
class RewardParts:
    """Holds the parts of the reward that are built before any worker starts, so that their errors come first.

    function: None if its weight is 0.  rendering: None feeds the policy's tokens to the reward model.
    """

    config: PPOConfig
    tokenizer: Any
    function: RewardManager | None
    rendering: Rendering | None = None
    judge_tokenizer: Any = None

    def manager(self, groups: Mapping[str, WorkerGroup]) -> RewardManager:
        """Returns the reward over the launched groups: the function's own manager where it is all there is."""
        scoring = self.config.reward_model
        parts = []
        if scoring.enable:
            parts.append(
                RewardPart(name=MODEL, weight=scoring.weight, start=ModelScorer(groups[REWARD_MODEL_ROLE], self.rendering))
            )
        if scoring.judge.model.path:
            parts.append(RewardPart(name=JUDGE, weight=scoring.judge.weight, start=self._judge(groups[JUDGE_ROLE])))
        if not parts and scoring.function_weight == 1.0 and self.function is not None:
            return self.function
        return CombinedManager(
            function=self.function,
            function_weight=scoring.function_weight,
            parts=parts,
            tokenizer=self.tokenizer,
            on_error=scoring.on_error,
            max_error_rate=scoring.max_error_rate,
        )

    def _judge(self, group: WorkerGroup) -> JudgeScorer:
        config = self.config.reward_model.judge
        generate = JudgeGenerator(group, config.n)
        return JudgeScorer(Judge(config=config, policy=self.tokenizer, tokenizer=self.judge_tokenizer, generate=generate))

    def close(self) -> None:
        if self.function is not None:
            self.function.close()


def prepare_reward(config: PPOConfig, tokenizer: Any) -> RewardParts:
    """Starts the reward function's first process and loads tokenizers.  Raises ConfigError for what cannot score together."""
    scoring = config.reward_model
    rendering = build_rendering(config, tokenizer) if scoring.enable else None
    judge = scoring.judge.model
    judge_tokenizer = load_tokenizer(judge.path, trust_remote_code=judge.trust_remote_code) if judge.path else None
    function = None
    if scoring.function_weight != 0:
        function = build_reward_manager(scoring, config.custom_reward_function, tokenizer, config.data.max_response_length)
    return RewardParts(
        config=config, tokenizer=tokenizer, function=function, rendering=rendering, judge_tokenizer=judge_tokenizer
    )


def reward_roles(config: PPOConfig, runtime: WorkerRuntime) -> dict[str, ClassWithInitArgs]:
    """Returns the roles that score with models, of those that are on."""
    scoring, roles = config.reward_model, {}
    if scoring.enable:
        roles[REWARD_MODEL_ROLE] = ClassWithInitArgs(RewardModelWorker, scoring, runtime)
    if scoring.judge.model.path:
        roles[JUDGE_ROLE] = ClassWithInitArgs(JudgeWorker, scoring.judge, config.actor_rollout_ref.rollout, runtime)
    return roles


def build_rendering(config: PPOConfig, policy: Any) -> Rendering | None:
    """Returns how texts are rendered for the reward model, None where it reads the policy's own tokens.

    Raises ConfigError where it could not read them, or its texts not be decoded.
    """
    model, key = config.reward_model.model, "reward_model.model"
    own = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    shape = local_shape(model.path, model.override_config)
    if model.input_tokenizer is None:
        _check_same_tokens(own, policy, f"{key}.path={model.path}", config.actor_rollout_ref.model.path)
        _check_vocabulary(shape, policy, f"{key}.path={model.path}")
        return None
    given = load_tokenizer(model.input_tokenizer)
    if given.get_vocab() != policy.get_vocab():
        raise ConfigError(
            f"{key}.input_tokenizer={model.input_tokenizer} has another vocabulary than the policy, whose responses it must "
            f"decode; set it to {config.actor_rollout_ref.model.path}"
        )
    _check_vocabulary(shape, own, f"{key}.path={model.path}")
    longest = config.reward_model.max_length or (shape.max_positions if shape is not None else 0)
    return Rendering(policy, own, longest or None)


def local_shape(path: str | None, overrides: Mapping[str, Any]) -> ModelShape | None:
    """Returns the sizes of a model in a local folder."""
    folder = Path(path or "").expanduser()
    return read_model_shape(folder, overrides) if path and folder.is_dir() else None


def _check_same_tokens(own: Any, policy: Any, model: str, policy_path: str | None) -> None:
    remedy = f"set reward_model.model.input_tokenizer={policy_path} to decode texts and render them anew"
    if own.get_vocab() != policy.get_vocab():
        raise ConfigError(
            f"{model} has another vocabulary ({len(own.get_vocab())} tokens) than the policy ({len(policy.get_vocab())}), whose "
            f"tokens it would be fed: the same ids mean other texts; {remedy}"
        )
    if own.chat_template != policy.chat_template:
        logger.warning("%s has another chat template than the policy, whose tokens it is fed; %s", model, remedy)


def _check_vocabulary(shape: ModelShape | None, tokenizer: Any, model: str) -> None:
    largest = max(tokenizer.get_vocab().values(), default=0)
    if shape is not None and largest >= shape.vocab_size:
        raise ConfigError(
            f"{model} has {shape.vocab_size} embeddings, but the tokenizer it reads has token ids up to {largest}; "
            "use the tokenizer the model was trained with"
        )


class ModelScorer:
    """Scores by the reward model: one pass over the batch, which runs while the driver scores with the function."""

    def __init__(self, group: WorkerGroup, rendering: Rendering | None) -> None:
        self.group, self.rendering = group, rendering

    def __call__(self, batch: DataProto) -> Callable[[], PartScores]:
        rows = self.rendering(batch) if self.rendering is not None else batch
        asked = rows.select(batch_keys=["input_ids", "attention_mask"], non_tensor_batch_keys=[], meta_info_keys=[])
        scored = self.group.compute_rm_score.submit(asked)
        return lambda: PartScores(outcomes=outcomes_of(scored.get().batch["rm_scores"]))


class JudgeScorer:
    """Scores by the judge, for callers without an event loop."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def __call__(self, batch: DataProto) -> Callable[[], PartScores]:
        return lambda: asyncio.run(self.judge(batch))


class JudgeGenerator:
    """Is `rewards.combine.Generate` over the judge's worker group: one call for all prompts, which blocks the loop it runs on."""

    def __init__(self, group: WorkerGroup, num_samples: int) -> None:
        self.group, self.num_samples = group, num_samples

    async def __call__(self, prompts: Sequence[Sequence[int]], numbers: Sequence[int]) -> list[list[list[int]]]:
        asked = padded(prompts, left=True)
        asked.batch["ordinal"] = torch.tensor(list(numbers), dtype=torch.int64)
        answered = self.group.generate_judgements(asked).batch
        lengths = answered["response_length"].tolist()
        rows = [ids[:length] for ids, length in zip(answered["responses"].tolist(), lengths, strict=True)]
        return [rows[first : first + self.num_samples] for first in range(0, len(rows), self.num_samples)]
