"""From prompts to one scored training batch: plain sampling, dynamic sampling, and the greedy response as a baseline.

Dynamic sampling (Yu et al. 2025, arXiv 2503.14476, section 3.2): a group whose samples all have the same reward has no
advantage to learn from.  Such groups are left out, and further prompts are drawn in the loader's order until the batch is full
of groups with signal.  What is decided here, where the paper leaves it open:

- groups with signal beyond data.train_batch_size are dropped, and counted;
- after max_num_gen_batches generations the batch is filled up with groups without signal, with a warning: its size, and so
  the optimizer steps, stay what the configuration says, and such groups have no gradient in estimators that compare samples;
- the batch keeps the order of drawing, so groups that fill up are spread over the mini-batches;
- a sample without a valid score is not compared.

Every prompt drawn has an ordinal of its own, also where it is drawn again in a later epoch, and seeds follow ordinals: no
sample is generated twice, and a resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhub.checkpoint.files import FileEntry
from rlhub.config.sections.ppo import PPOConfig
from rlhub.data.prompts import PromptLoader
from rlhub.errors import CheckpointError
from rlhub.protocol import DataProto
from rlhub.rewards.base import FAILED
from rlhub.trainer.ppo.requirements import requirements
from rlhub.trainer.ppo.rollouts import Generator
from rlhub.trainer.ppo.scoring import SIGNAL, Scorer

logger = logging.getLogger(__name__)

STREAMED = "rollouts"
"""Key of a checkpoint's state that is written by rollout.mode=async."""
PROMPTS_IN_WORK = (
    "the checkpoint was made with actor_rollout_ref.rollout.mode=async and holds prompts in work, which mode=sync "
    "cannot go on with; resume with mode=async (trainer.max_staleness=0 takes turns too), or start anew"
)
COUNTS = FAILED
"""Metrics that add up over generations; other numbers of the scorer are averaged."""
PROMPT_AND_RESPONSE = ("input_ids", "attention_mask")


@dataclass(slots=True)
class Sampler:
    """`sample(prompts)` gives one scored batch of data.train_batch_size prompts; `metrics` holds that call's measurements."""

    config: PPOConfig
    loader: PromptLoader
    generator: Generator
    scorer: Scorer
    metrics: dict[str, float] = field(init=False, default_factory=dict)
    _drawn: list[dict[str, float]] = field(init=False, default_factory=list)

    def start(self) -> None:
        """Nothing runs between two batches."""

    def sample(self, prompts: Iterator[DataProto], step: int) -> DataProto:
        """Take as many batches of prompts as are needed; rows of a prompt are neighbours and share a `uid`."""
        self.metrics, self._drawn = {}, []
        batch = self._collect(prompts) if self.config.algorithm.filter_groups.enable else self._draw(next(prompts))
        self.metrics |= merged(self._drawn)
        return batch

    @property
    def policy_version(self) -> int:
        return self.generator.policy_version

    def publish(self, version: int) -> None:
        """The next generation begins with the new weights, where the step changed any."""
        if version > self.config.trainer.critic_warmup:
            self.generator.policy_version = version

    def save(self, folder: Path) -> list[FileEntry]:
        """Everything is in `state`."""
        return []

    def state(self) -> dict[str, Any]:
        """The loader stands where the next batch begins."""
        return {"loader": self.loader.state(), "policy_version": self.policy_version}

    def load_state(self, state: Mapping[str, Any], folder: Path) -> None:
        """CheckpointError for what only a stream of episodes can go on with."""
        if STREAMED in state:
            raise CheckpointError(PROMPTS_IN_WORK)
        self.loader.load_state(state["loader"])
        self.generator.policy_version = state["policy_version"]

    def _draw(self, prompts: DataProto) -> DataProto:
        """One generation, scored."""
        batch = self.generator.training(prompts)
        metrics = self.scorer(batch)
        if requirements(self.config).baseline_rewards:
            greedy = self.generator.greedy(prompts)
            metrics = merge(metrics, add_baseline(batch, greedy, self.scorer))
        self._drawn.append(metrics)
        return batch

    def _collect(self, prompts: Iterator[DataProto]) -> DataProto:
        """Draw until there are enough groups with signal, or the bound is reached."""
        limit, wanted = self.config.algorithm.filter_groups.max_num_gen_batches, self.config.data.train_batch_size
        with_signal, without = [], []
        num_found = num_generated = 0
        reward_sum = num_valid = 0.0
        while num_found < wanted and len(self._drawn) < limit:
            batch = self._draw(next(prompts))
            reward_sum += batch.batch["scores"][batch.batch["valid"]].double().sum().item()
            num_valid += batch.batch["valid"].sum().item()
            signal = groups_with_signal(batch, self.config.actor_rollout_ref.rollout.n)
            num_generated += len(signal)
            room = max(wanted - num_found, 0)
            num_found += int(signal.sum())
            with_signal.append(self._groups(batch, signal.nonzero().squeeze(1)[:room]))
            without.append(self._groups(batch, (~signal).nonzero().squeeze(1)[: max(wanted - num_found, 0)]))
        filled = max(wanted - num_found, 0)
        if filled:
            self._warn(num_found, filled)
        self.metrics = {
            "sampling/num_gen_batches": float(len(self._drawn)),
            "sampling/num_prompts_generated": float(num_generated),
            "sampling/share_filtered": 1 - num_found / num_generated,
            "sampling/num_dropped": float(max(num_found - wanted, 0)),
            "sampling/num_filled": float(filled),
            "sampling/reward_mean": reward_sum / max(num_valid, 1.0),
        }
        spare = join(without).slice(0, filled * self.config.actor_rollout_ref.rollout.n)
        return in_order_of_drawing(join([*with_signal, spare] if filled else with_signal))

    def _groups(self, batch: DataProto, groups: Tensor) -> DataProto:
        """All rows of those groups (numbers within the batch)."""
        n = self.config.actor_rollout_ref.rollout.n
        return batch.select_idxs((groups[:, None] * n + torch.arange(n)).flatten())

    def _warn(self, num_found: int, filled: int) -> None:
        groups = self.config.algorithm.filter_groups
        logger.warning(
            "dynamic sampling: after %d generations (algorithm.filter_groups.max_num_gen_batches) %d of %d prompts have samples "
            "that differ in %s; %d without signal fill the batch. The problems may be too easy or too hard for the policy: raise "
            "the bound or actor_rollout_ref.rollout.n, or change the data",
            len(self._drawn), num_found, self.config.data.train_batch_size, groups.metric, filled,
        )  # fmt: skip


def add_baseline(batch: DataProto, greedy: DataProto, scorer: Scorer) -> dict[str, float]:
    """Adds baseline_rewards (rows,): the reward of each prompt's greedy response (Li et al. 2024, arXiv 2310.10505); returns
    the metrics of scoring it.

    greedy: one row a prompt, in the order in which `batch`, which is scored, has its samples side by side.  Where that response
    has no valid score there is nothing to compare with, and the prompt's samples do not train.
    """
    metrics, n = scorer(greedy), len(batch) // len(greedy)
    scores, valid = greedy.batch["scores"], greedy.batch["valid"]
    batch.batch["baseline_rewards"] = scores.repeat_interleave(n)
    batch.batch["valid"] = batch.batch["valid"] & valid.repeat_interleave(n)
    counts = {name: value for name, value in metrics.items() if name.startswith(COUNTS)}
    return counts | ({"reward/greedy_mean": scores[valid].double().mean().item()} if bool(valid.any()) else {})


def groups_with_signal(batch: DataProto, n: int) -> Tensor:
    """(prompts,) bool: at least two of a prompt's n neighbouring samples have a valid score and differ in it."""
    values, valid = batch.batch[SIGNAL].reshape(-1, n), batch.batch["valid"].reshape(-1, n)
    high = values.masked_fill(~valid, -torch.inf).amax(1)
    low = values.masked_fill(~valid, torch.inf).amin(1)
    return high > low


def in_order_of_drawing(batch: DataProto) -> DataProto:
    """Rows by their prompt's ordinal, samples as they were; `uid` is numbered anew from 0."""
    batch.reorder(torch.argsort(batch.batch["ordinal"], stable=True))
    batch.batch["uid"] = torch.unique_consecutive(batch.batch["ordinal"], return_inverse=True)[1]
    return batch


def join(parts: Sequence[DataProto]) -> DataProto:
    """The rows of all parts in order; prompts are padded on the left and responses on the right to the widest."""
    prompt = max(prompt_width(part) for part in parts)
    response = max(part.batch["responses"].shape[1] for part in parts)
    return DataProto.concat([widen(part, prompt, response) for part in parts])


def prompt_width(batch: DataProto) -> int:
    """Columns of `input_ids` before the response."""
    return int(batch.batch["input_ids"].shape[1] - batch.batch["responses"].shape[1])


def widen(batch: DataProto, prompt: int, response: int) -> DataProto:
    """The same rows with so wide a prompt and response; every two-dimensional column gains zeros outside the masks."""
    left, right = prompt - prompt_width(batch), response - batch.batch["responses"].shape[1]
    if left == 0 and right == 0:
        return batch
    tensors = {
        name: pad(column, (left if name in PROMPT_AND_RESPONSE else 0, right)) if column.dim() == 2 else column
        for name, column in batch.tensors().items()
    }
    return DataProto.from_dict(tensors, batch.non_tensor_batch, batch.meta_info)


def merge(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """Both, counts added up; other numbers are of one side only."""
    return one | {name: value + one.get(name, 0.0) for name, value in other.items()}


def merged(draws: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of several generations of equal size: counts add up, the rest is averaged over those that have it."""
    names = dict.fromkeys(name for metrics in draws for name in metrics)
    values = {name: [metrics[name] for metrics in draws if name in metrics] for name in names}
    return {name: sum(found) if name.startswith(COUNTS) else sum(found) / len(found) for name, found in values.items()}
