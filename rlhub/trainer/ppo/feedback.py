"""What samples score reaches the sampler of the prompts (rlhub.data.samplers) at one point of each step.

Groups are noted as they are scored, in whatever order that happens.  They enter when the weights of their step have been
published, before the prompts of the next are drawn, sorted by ordinal: so with trainer.max_staleness=0 what is drawn does not
depend on which episode ended first, and an asynchronous run draws what a synchronous one draws.  Above 0 each prompt enters once,
and when it does depends on how far generation is ahead.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from rlhub.data.order import ResumableLoader
from rlhub.data.samplers import Observation

UNTRAINED = 0
"""The step of a prompt that was turned down, until the step ends for which it was drawn."""


@dataclass(slots=True)
class PromptScore:
    """What the samples of a prompt scored.  row: of the data set.  step: the training step after which it enters."""

    row: int
    pass_rate: float
    reward: float
    step: int = UNTRAINED


@dataclass(slots=True)
class SamplerFeedback:
    """Keeps what was scored until it enters.  Used from the trainer's thread and from the event loop of episodes."""

    loader: ResumableLoader
    _waiting: dict[int, PromptScore] = field(init=False, default_factory=dict)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.loader.remembers = True

    @property
    def wanted(self) -> bool:
        """Returns whether the sampler reads scores."""
        return self.loader.sampler.observes

    def note(self, columns: Mapping[str, Tensor], ordinals: Tensor, episodes: Tensor | None = None) -> None:
        """Notes scored rows; a prompt without a valid score is left out.

        columns: scores, valid and correct, (rows,); ordinals: (rows,) int64, the prompt of each.  episodes: (rows,), the episode
        of each row, which counts once; None where every row is one.
        """
        if not self.wanted:
            return
        counted = columns["valid"].numpy().copy()
        if episodes is not None:
            first = np.zeros_like(counted)
            first[np.unique(episodes.numpy(), return_index=True)[1]] = True
            counted &= first
        prompts, scores, correct = (column.numpy()[counted] for column in (ordinals, columns["scores"], columns["correct"]))
        found = np.unique(prompts).tolist()
        rows = self.loader.rows_of(found)
        with self._lock:
            for prompt, row in zip(found, rows, strict=True):
                own = prompts == prompt
                pass_rate, reward = correct[own].mean(dtype=np.float64), scores[own].mean(dtype=np.float64)
                self._waiting[prompt] = PromptScore(row, float(pass_rate), float(reward))

    def trained(self, step: int) -> None:
        """Ends a step: what was noted until now enters after it."""
        with self._lock:
            for score in self._waiting.values():
                score.step = score.step or step

    def enter(self, step: int) -> None:
        """Gives the sampler what was noted for this step and those before it, in the order of ordinals."""
        with self._lock:
            due = sorted(ordinal for ordinal, score in self._waiting.items() if 0 < score.step <= step)
            scores = [self._waiting.pop(ordinal) for ordinal in due]
        if scores:
            self.loader.sampler.observe(observation(scores, step))

    def state(self) -> list[list[Any]]:
        """Returns what has not entered, JSON-able."""
        with self._lock:
            return [[ordinal, asdict(score)] for ordinal, score in sorted(self._waiting.items())]

    def load_state(self, state: Sequence[Sequence[Any]]) -> None:
        """Goes on with what `state` returned."""
        self._waiting = {int(ordinal): PromptScore(**score) for ordinal, score in state}


def observation(scores: Sequence[PromptScore], step: int) -> Observation:
    """Returns the scores as a sampler reads them."""
    return Observation(
        indices=np.array([score.row for score in scores], dtype=np.int64),
        pass_rates=np.array([score.pass_rate for score in scores], dtype=np.float64),
        rewards=np.array([score.reward for score in scores], dtype=np.float64),
        step=step,
    )
