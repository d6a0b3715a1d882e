"""Scores of sampled responses: the reward of each row, that of the greedy responses they are compared with, and the numbers of
the reward that an estimator or the group filter reads.

The training step scores every response once, wherever it was sampled.  A reward function may have judged a finished episode
before (episode_scoring.py): then the batch carries what it returned, and only what is made of it for the batch is left.

The reward itself is put together here too: the processes of the reward function, the roles that score with models, and one
manager over all of them (`RewardParts`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhub.algorithms.inputs import COMPONENT
from rlhub.config.rules.sources import rewards_of
from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import ConfigError, RewardError
from rlhub.models.shape import ModelShape, local_shape
from rlhub.models.tokenizer import load_tokenizer
from rlhub.protocol import Batch, BatchRef
from rlhub.registry import suggest
from rlhub.rewards import RewardManager, RewardResult, build_reward_manager
from rlhub.rewards.base import FAILED, ScoredRows, start_scoring
from rlhub.rewards.combine import (
    JUDGE,
    MODEL,
    NUMBER,
    CombinedManager,
    PartScores,
    RewardPart,
    judged,
    outcomes_of,
    running_numbers,
)
from rlhub.rewards.managers import NaiveManager, reward_function
from rlhub.rewards.pool import RewardFunction
from rlhub.rewards.rows import REWARD_FIELDS, ROW_TOKENS, unpack_outcomes
from rlhub.rollout_service.executor.batches import TOOL_REWARDS, with_tool_rewards
from rlhub.single_controller import ClassWithInitArgs, WorkerGroup
from rlhub.trainer.ppo.requirements import NAMES_OF_THE_REWARD, requirements
from rlhub.trainer.ppo.validation_metrics import ACCURACY, CORRECT_ABOVE, correctness
from rlhub.trainer.ppo.worker_groups import ACTOR_ROLE, COLOCATED_ROLE, ROLLOUT_ROLE
from rlhub.utils.timing import PhaseTimer
from rlhub.workers.memory_handover import WorkerRuntime
from rlhub.workers.roles import JudgeWorker, RewardModelWorker

logger = logging.getLogger(__name__)


SIGNAL = "group_metric"
"""Column (rows,) float64: the number in which the samples of a group are compared."""
COUNTS = FAILED
"""Metrics that add up over several scorings; other numbers of the scorer are averaged."""


@dataclass(slots=True, kw_only=True)
class Samples:
    """Holds what a source has sampled.

    batch: the samples of each prompt side by side.  greedy: the most likely response to each of these prompts, in their order;
    None where no estimator compares with it.  scoring: the scores on their way.
    """

    batch: Batch
    greedy: Batch | None = None
    scoring: Scoring | None = None

    def scored(self) -> Batch:
        """Returns the batch with its scores, which are waited for."""
        if self.scoring is not None:
            self.scoring.add_to(self.batch)
        return self.batch


@dataclass(slots=True)
class Scoring:
    """The scores of samples on their way.  finish: waits for the columns (rows,), in the order of sampling, and the metrics.
    columns: these columns, as soon as they were waited for."""

    finish: Callable[[], tuple[dict[str, Tensor], dict[str, float]]]
    columns: dict[str, Tensor] = field(default_factory=dict)
    _metrics: dict[str, float] | None = None

    def add_to(self, batch: Batch) -> dict[str, float]:
        """Waits for the scores, adds them to the samples, and returns the metrics.  The first batch gets the columns; later ones
        are made of its rows.

        batch: all of the samples, in the order of sampling or as its column `sample_index` says.
        Raises RewardError when more rows failed than the limit allows.
        """
        if self._metrics is None:
            self.columns, self._metrics = self.finish()
            order = batch.batch["sample_index"] if "sample_index" in batch.batch.keys() else slice(None)
            for name, column in self.columns.items():
                batch.batch[name] = column[order]
        return self._metrics


def add_scores(batch: Batch, scorings: Sequence[Scoring]) -> dict[str, float]:
    """Waits for the scores of a step's samplings, adds them to the batch unless it has them, and returns their metrics."""
    return merge_scorings([scoring.add_to(batch) for scoring in scorings])


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

    def submit(self, samples: Samples) -> Scoring:
        """Begins to score the samples and returns at once.  With greedy responses there is a column baseline_rewards too."""
        begun = self._begin(samples.batch)
        compared = None if samples.greedy is None else self._begin(samples.greedy)

        def finish() -> tuple[dict[str, Tensor], dict[str, float]]:
            with self.timers.measure("reward"):
                columns, metrics = begun()
                if compared is not None:
                    greedy, more = compared()
                    metrics |= {name: value + metrics.get(name, 0.0) for name, value in more.items() if name.startswith(COUNTS)}
                    metrics |= add_baseline(columns, greedy, samples.batch.batch["ordinal"])
                if isinstance(samples.greedy, BatchRef):
                    samples.greedy.drop()
            return columns, metrics

        samples.scoring = Scoring(finish)
        return samples.scoring

    def score_rows(self, batch: Batch) -> dict[str, float]:
        """Adds the scores to a batch, and returns the metrics."""
        return self.submit(Samples(batch=batch)).add_to(batch)

    def _begin(self, batch: Batch) -> Callable[[], tuple[dict[str, Tensor], dict[str, float]]]:
        """Begins to score rows.  The result waits for scores (rows,), valid (rows,), correct (rows,) bool, what validation counts
        as right, and what else is kept of the reward; it gives token_level_scores (rows, response) only where a manager scores
        tokens, and configured_scores (rows,), the scores without the rewards of tools, only where there are some.

        Rows that come with their scores keep them: those of workflows that give rewards themselves, and recorded batches.
        """
        tensors = batch.batch
        if "scores" in tensors.keys():
            own = {name: tensors[name] for name in ("scores", "valid")}
            own["correct"] = tensors.get(f"{COMPONENT}{ACCURACY}", tensors["scores"]) > CORRECT_ABOVE
            if self.metric is not None:
                own[SIGNAL] = tensors.get(f"{COMPONENT}{self.metric}", tensors["scores"]).double()
            return lambda: (own, {})
        pending, tools = start_scoring(self.reward, batch), tensors.get(TOOL_REWARDS)

        def finish() -> tuple[dict[str, Tensor], dict[str, float]]:
            result = pending()
            correct = torch.from_numpy(correctness(result.extra, result.scores.numpy()))
            columns = {"scores": result.scores, "valid": result.valid, "correct": correct}
            if result.token_level_scores is not None:
                columns["token_level_scores"] = result.token_level_scores
            if tools is not None:
                columns["configured_scores"] = result.scores
                columns["scores"] = result.scores = with_tool_rewards(result.scores, result.valid, tools)
            return columns | self._kept(result), result.metrics

        return finish

    def _kept(self, result: RewardResult) -> dict[str, Tensor]:
        """Returns the numbers of the reward that the estimator or the group filter reads."""
        names = numeric_entries(result) if self.components else []
        columns = {f"{COMPONENT}{name}": component(result, name) for name in names}
        return columns if self.metric is None else columns | {SIGNAL: group_metric(result, self.metric)}


def build_scorer(config: PPOConfig, reward: RewardManager, timers: PhaseTimer) -> Scorer:
    """Returns a scorer that keeps what the chosen estimator and the group filter read."""
    groups = config.algorithm.filter_groups
    return Scorer(
        reward=reward,
        timers=timers,
        components=requirements(config).reward_components,
        metric=groups.metric if config.algorithm.filtering else None,
    )


def add_baseline(columns: dict[str, Tensor], greedy: Mapping[str, Tensor], ordinal: Tensor) -> dict[str, float]:
    """Adds baseline_rewards (rows,): the reward of each prompt's greedy response (Li et al. 2024, arXiv 2310.10505); returns
    their mean as a metric.

    columns: scores and valid of the samples, which stand side by side in the order of `greedy`, which has one row a prompt.
    ordinal: (rows,) int64, the prompt of each row.
    Where that response has no valid score there is nothing to compare with, and the prompt's samples do not train.
    """
    scores, valid = greedy["scores"], greedy["valid"]
    prompt = torch.unique_consecutive(ordinal, return_inverse=True)[1]
    columns["baseline_rewards"] = scores[prompt]
    columns["valid"] = columns["valid"] & valid[prompt]
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
MODEL_TOKENS = ("input_ids", "attention_mask")
"""Columns that a reward model of the policy's tokens reads."""
JUDGED_FIELDS = ("raw_chat", "ground_truth")
"""Columns of the data that a judge reads."""


@dataclass(slots=True, kw_only=True)
class RewardParts:
    """Holds the parts of the reward that are built before any worker starts, so that their errors come first.

    function: None if its weight is 0.
    """

    config: PPOConfig
    function: RewardManager | None

    def manager(self, groups: Mapping[str, WorkerGroup]) -> RewardManager:
        """Returns the reward over the launched groups: the function's own manager where it is all there is."""
        scoring = self.config.reward_model
        parts = []
        if scoring.enable:
            model = ModelScorer(group=groups[REWARD_MODEL_ROLE], renders=bool(scoring.model.input_tokenizer))
            parts.append(RewardPart(name=MODEL, weight=scoring.weight, start=model))
        if scoring.judge.model.path:
            judge = JudgeScorer(group=groups[JUDGE_ROLE])
            parts.append(RewardPart(name=JUDGE, weight=scoring.judge.weight, start=judge))
        function = None if self.function is None else self._where_rows_are(self.function, groups)
        if not parts and scoring.function_weight == 1.0 and function is not None:
            return function
        return CombinedManager(
            function=function,
            function_weight=scoring.function_weight,
            parts=parts,
            on_error=scoring.on_error,
            max_error_rate=scoring.max_error_rate,
        )

    def _where_rows_are(self, function: RewardManager, groups: Mapping[str, WorkerGroup]) -> RewardManager:
        """Returns the function's manager; where the ranks that have the rows score them for it, the driver's processes end."""
        rollout = next((groups[role] for role in (ROLLOUT_ROLE, COLOCATED_ROLE, ACTOR_ROLE) if role in groups), None)
        scores = rollout is not None and "begin_scoring" in rollout.methods()
        if rollout is not None and scores and isinstance(function, NaiveManager) and function.scores_rows:
            function.close()
            return RowsOnRanks(function, rollout)
        if self.config.trainer.controller == "multi":
            raise ConfigError(
                f"trainer.controller=multi with reward_model.reward_manager={self.config.reward_model.reward_manager}, which "
                "reads whole batches in one process; choose one that scores row by row, or trainer.controller=single"
            )
        return function

    def close(self) -> None:
        if self.function is not None:
            self.function.close()


def prepare_reward(config: PPOConfig, tokenizer: Any) -> RewardParts:
    """Starts the reward function's first process and loads tokenizers.  Raises ConfigError for what cannot score together."""
    scoring = config.reward_model
    if scoring.enable:
        check_tokens(config, tokenizer)
    judge = scoring.judge.model
    if judge.path:
        load_tokenizer(judge.path, trust_remote_code=judge.trust_remote_code)
    function = None
    if scoring.function_weight != 0 and config.env.name is None:  # simulators give rewards themselves
        limit, own = config.data.max_response_length, rewards_of(config.data)
        function = build_reward_manager(scoring, config.custom_reward_function, tokenizer, limit, own)
    return RewardParts(config=config, function=function)


def configured_function(config: PPOConfig) -> RewardFunction:
    """Returns the reward function, with those of data sources, as it travels to where rows are scored."""
    return reward_function(config.reward_model, config.custom_reward_function, rewards_of(config.data))


def reward_roles(config: PPOConfig, runtime: WorkerRuntime) -> dict[str, ClassWithInitArgs]:
    """Returns the roles that score with models, of those that are on."""
    scoring, roles = config.reward_model, {}
    if scoring.enable:
        roles[REWARD_MODEL_ROLE] = ClassWithInitArgs(RewardModelWorker, scoring, runtime)
    if scoring.judge.model.path:
        roles[JUDGE_ROLE] = ClassWithInitArgs(JudgeWorker, scoring.judge, config.actor_rollout_ref, runtime)
    return roles


def check_tokens(config: PPOConfig, policy: Any) -> None:
    """Raises ConfigError where the reward model could not read the policy's tokens, or those of its texts.

    policy: its tokenizer.
    """
    model, key = config.reward_model.model, "reward_model.model"
    own = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    shape = local_shape(model.path, model.override_config)
    if model.input_tokenizer is None:
        _check_same_tokens(own, policy, f"{key}.path={model.path}", config.actor_rollout_ref.model.path)
        _check_vocabulary(shape, policy, f"{key}.path={model.path}")
        return
    given = load_tokenizer(model.input_tokenizer)
    if given.get_vocab() != policy.get_vocab():
        raise ConfigError(
            f"{key}.input_tokenizer={model.input_tokenizer} has another vocabulary than the policy, whose responses it must "
            f"decode; set it to {config.actor_rollout_ref.model.path}"
        )
    _check_vocabulary(shape, own, f"{key}.path={model.path}")


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


@dataclass(slots=True)
class RowsOnRanks:
    """A manager whose rows are scored by the ranks that generated them, beside their next calls.  group: the rollout's."""

    manager: NaiveManager
    group: WorkerGroup
    _numbers: Iterator[int] = field(init=False, default_factory=itertools.count)

    def __call__(self, batch: Batch) -> RewardResult:
        return self.start(batch)()

    def start(self, batch: Batch) -> Callable[[], RewardResult]:
        """Gives the ranks their rows with the data's columns that the function reads; see BackgroundManager."""
        facts, key = ScoredRows.of(batch, []), f"scoring-{next(self._numbers)}"
        asked = batch.select(ROW_TOKENS, REWARD_FIELDS, [])
        self.group.begin_scoring(asked, key, self.manager.max_failures(len(batch)))

        def finish() -> RewardResult:
            outcomes = [one for part in self.group.take_outcomes(key) for one in unpack_outcomes(part)]
            return self.manager.reward(replace(facts, outcomes=outcomes))

        return finish

    def close(self) -> None:
        self.manager.close()


@dataclass(slots=True, kw_only=True)
class ModelScorer:
    """Scores by the reward model: one pass over the batch, where the rows are.

    renders: whether the model reads the rows' texts in its own tokens, else it reads the policy's tokens.
    """

    group: WorkerGroup
    renders: bool

    def __call__(self, batch: Batch) -> Callable[[], PartScores]:
        tokens, fields = (ROW_TOKENS, ("raw_chat",)) if self.renders else (MODEL_TOKENS, ())
        scored = self.group.compute_rm_score.submit(batch.select(tokens, fields, []))
        return lambda: PartScores(outcomes=outcomes_of(scored.get().batch["rm_scores"]))


@dataclass(slots=True, kw_only=True)
class JudgeScorer:
    """Scores by the judge, whose ranks make its prompts of the rows and read its answers."""

    group: WorkerGroup

    def __call__(self, batch: Batch) -> Callable[[], PartScores]:
        asked = batch.select(ROW_TOKENS, JUDGED_FIELDS, [])
        asked.batch[NUMBER] = torch.tensor(running_numbers(batch.batch["ordinal"].tolist()), dtype=torch.int64)
        sent = self.group.generate_judgements.submit(asked)
        return lambda: judged(sent.get())
