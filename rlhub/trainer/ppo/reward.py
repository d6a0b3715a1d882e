"""The run's reward, put together: the function's processes, the roles that score with models, and one manager over them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import ConfigError
from rlhub.models.shape import ModelShape, read_model_shape
from rlhub.models.tokenizer import load_tokenizer
from rlhub.protocol import DataProto
from rlhub.rewards import RewardManager, build_reward_manager
from rlhub.rewards.combine import JUDGE, MODEL, CombinedManager, PartScores, RewardPart, outcomes_of
from rlhub.rewards.judge import Judge
from rlhub.rewards.rendering import Rendering, padded
from rlhub.single_controller import ClassWithInitArgs, WorkerGroup
from rlhub.workers.memory_handover import WorkerRuntime
from rlhub.workers.reward_model import JudgeWorker, RewardModelWorker

logger = logging.getLogger(__name__)

REWARD_MODEL_ROLE, JUDGE_ROLE = "reward_model", "judge"


@dataclass(slots=True, kw_only=True)
class RewardParts:
    """The parts of the reward that are built before any worker starts, so that their errors come first.

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
    """Is `rewards.judge.Generate` over the judge's worker group: one call for all prompts, which blocks the loop it runs on."""

    def __init__(self, group: WorkerGroup, num_samples: int) -> None:
        self.group, self.num_samples = group, num_samples

    async def __call__(self, prompts: Sequence[Sequence[int]], numbers: Sequence[int]) -> list[list[list[int]]]:
        asked = padded(prompts, left=True)
        asked.batch["ordinal"] = torch.tensor(list(numbers), dtype=torch.int64)
        answered = self.group.generate_judgements(asked).batch
        lengths = answered["response_length"].tolist()
        rows = [ids[:length] for ids, length in zip(answered["responses"].tolist(), lengths, strict=True)]
        return [rows[first : first + self.num_samples] for first in range(0, len(rows), self.num_samples)]
