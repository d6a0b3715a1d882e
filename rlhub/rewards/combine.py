"""Combines several scorers into one reward: a reward function, a learned reward model, and a judge.

    reward = function_weight * function + weight * model + judge.weight * judge

Each part's own, unweighted scores stay in `RewardResult.extra` under its name.  Where there is a function, it alone decides which
samples validation counts as correct (pass@k): a learned score says how good a response is, and not whether it is right.

The judge is a language model that answers a question about each response with a score in words (Zheng et al. 2023, arXiv
2306.05685).  Its answer is matched against a regular expression and never evaluated.  `Judge` gets a `generate` callable; the
rollout engine behind it belongs to the judge worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from re import Pattern
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rlhub.algorithms.inputs import on_last_token
from rlhub.config.sections.reward import JudgeConfig
from rlhub.errors import RewardError
from rlhub.protocol import Batch, DataProto
from rlhub.rewards.base import (
    FAILED,
    FAILED_SHARE,
    BackgroundManager,
    RewardManager,
    RewardResult,
    ScoredRows,
    check_failures,
    needs_tokens,
    start_scoring,
)
from rlhub.rewards.judge_prompt import JudgePrompt, read_pattern, read_prompt, read_score
from rlhub.rewards.managers import as_rewards, numeric_means
from rlhub.rewards.pool import LARGEST_SCORE, RewardFailure, RewardOutcome
from rlhub.rewards.rendering import ChatTokenizer, question_of, render
from rlhub.rewards.rows import Decoder, PackedOutcomes, pack_outcomes, response_texts, rows_here, unpack_outcomes

FUNCTION, MODEL, JUDGE = "function", "model", "judge"
CORRECT_ABOVE = 0.5  # a function's score above this is correct, where the function returns no "acc" of its own
SAMPLES = 1 << 12  # responses to one prompt whose judgements have noise of their own
NUMBER = "judgement"
"""Column (rows,) int64: the number of each row for the noise of its judgements, see `running_numbers`."""
SHOWN = 200  # characters of an unreadable judgement in a message


@dataclass(slots=True, kw_only=True)
class PartScores:
    """The scores of one part of the reward.  outcomes: one for each row; metrics: the scorer's own metrics."""

    outcomes: list[RewardOutcome]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class RewardPart:
    """A scorer besides the function.

    start: is called once a batch, sends the requests and returns without blocking; the callable it returns blocks until each
    row has a score or a failure.
    """

    name: str
    weight: float
    start: Callable[[Batch], Callable[[], PartScores]]


@dataclass(slots=True, kw_only=True)
class CombinedManager:
    """A RewardManager that sums the weighted scores of a function and of further parts.

    function: None: the parts alone score.  A failed row of any part follows `on_error`: the run stops, the row is masked, or that
    part counts 0.  The function starts first, since it has processes of its own, and all parts before one is waited for.
    """

    function: RewardManager | None
    function_weight: float
    parts: Sequence[RewardPart]
    on_error: Literal["fail", "mask", "zero"]
    max_error_rate: float

    def __call__(self, batch: DataProto) -> RewardResult:
        return self.start(batch)()

    def start(self, batch: Batch) -> Callable[[], RewardResult]:
        """Starts the function and all parts."""
        facts, written = ScoredRows.of(batch, []), None
        called = None if isinstance(self.function, BackgroundManager) else self.function
        if called is not None and needs_tokens(called, batch):
            batch = rows_here(batch)
            written = batch.batch["response_mask"]
        function = None if self.function is None else start_scoring(self.function, batch)
        started = [(part, part.start(batch)) for part in self.parts]

        def finish() -> RewardResult:
            result = self._function_result(len(facts.lengths), function)
            for part, found in started:
                share = self._add(result, part, found(), facts)
                if result.token_level_scores is not None:
                    assert written is not None, "its manager was given the rows"
                    result.token_level_scores = result.token_level_scores + on_last_token(share, written)
            result.scores[~result.valid] = 0
            result.scores = as_rewards(result.scores.numpy())
            if result.token_level_scores is not None:
                result.token_level_scores[~result.valid] = 0
            return result

        return finish

    def close(self) -> None:
        if self.function is not None:
            self.function.close()

    def _function_result(self, num_rows: int, function: Callable[[], RewardResult] | None) -> RewardResult:
        """Waits for the function and returns its weighted scores; zeros without a function."""
        if function is None:
            scores, valid = torch.zeros(num_rows), torch.ones(num_rows, dtype=torch.bool)
            return RewardResult(scores=scores, valid=valid, extra={}, metrics={FAILED: 0.0, FAILED_SHARE: 0.0})
        result = function()
        raw = result.scores.double().numpy()
        own = {FUNCTION: column_of(raw, result.valid.numpy())}
        return RewardResult(
            scores=self.function_weight * result.scores,
            valid=result.valid.clone(),
            extra=result.extra | own | {"acc": accuracy(result.extra.get("acc"), raw)},
            metrics=result.metrics | part_means(own),
            token_level_scores=None if result.token_level_scores is None else self.function_weight * result.token_level_scores,
        )

    def _add(self, result: RewardResult, part: RewardPart, found: PartScores, facts: ScoredRows) -> Tensor:
        """Adds the scores of a part, and returns its share in the reward, (B,) float32."""
        counted = self._check(part.name, replace(facts, outcomes=found.outcomes))
        scored = np.array([outcome.error is None for outcome in found.outcomes], dtype=bool)
        raw = np.array([outcome.score for outcome in found.outcomes], dtype=np.float64)
        share = torch.from_numpy(part.weight * np.where(scored, raw, 0.0)).float()
        result.scores = result.scores + share
        if self.on_error == "mask":
            result.valid = result.valid & torch.from_numpy(scored)
        own = {part.name: column_of(raw, scored)}
        result.extra |= own
        result.metrics = add_failures(result.metrics, counted, len(raw)) | part_means(own) | found.metrics
        return share

    def _check(self, name: str, rows: ScoredRows) -> dict[str, float]:
        if all(outcome.error is None for outcome in rows.outcomes):
            return {}
        try:
            return check_failures(rows, on_error=self.on_error, max_error_rate=self.max_error_rate)
        except RewardError as error:
            raise RewardError(f"the {name} part of the reward: {error}") from error


def part_means(own: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns the metric reward/<part> of each part: the mean of its unweighted scores."""
    return {f"reward/{name}": mean for name, mean in numeric_means(own).items()}


def column_of(raw: np.ndarray, scored: np.ndarray) -> np.ndarray:
    """Returns scores (B,) as a column of `extra`: float64, or objects with None where scoring failed."""
    if scored.all():
        return raw
    column = raw.astype(object)
    column[~scored] = None
    return column


def accuracy(own: np.ndarray | None, scores: np.ndarray) -> np.ndarray:
    """Returns the function's "acc" (B,); for rows without one 1 where the score exceeds 0.5, else 0."""
    default = (scores > CORRECT_ABOVE).astype(np.float64)
    if own is None:
        return default
    return np.array([one if value is None else value for one, value in zip(default, own, strict=True)])


def add_failures(metrics: dict[str, float], more: dict[str, float], num_rows: int) -> dict[str, float]:
    """Returns `metrics` with another scorer's failures added; a row on which two scorers fail counts twice."""
    total = dict(metrics)
    for name, count in more.items():
        if name.startswith(FAILED):
            total[name] = total.get(name, 0.0) + count
    total[FAILED_SHARE] = total.get(FAILED, 0.0) / max(num_rows, 1)
    return total


def outcomes_of(scores: Tensor) -> list[RewardOutcome]:
    """Returns the outcomes of a reward model's scores (rows,); a score that is no finite float32 is a failure."""
    return [
        RewardOutcome(score=score)
        if abs(score) <= LARGEST_SCORE  # false of NaN
        else RewardOutcome(error=RewardFailure(kind="bad_value", message=f"the reward model's score is {score}"))
        for score in scores.tolist()
    ]


Generate = Callable[[Sequence[Sequence[int]], Sequence[int]], list[list[list[int]]]]
"""Called with (prompts, a number of each for its sampling noise), returns the token ids of JudgeConfig.n completions a prompt."""


class Judgements(NamedTuple):
    """The judgements of rows, as they travel between processes.  num_read: of num_written, those with a score."""

    outcomes: PackedOutcomes
    num_written: int
    num_read: int


def judged(parts: Sequence[Judgements]) -> PartScores:
    """Returns the judge's part of the reward out of the judgements of consecutive rows."""
    written, read = sum(part.num_written for part in parts), sum(part.num_read for part in parts)
    return PartScores(
        outcomes=[outcome for part in parts for outcome in unpack_outcomes(part.outcomes)],
        metrics={
            "reward/judge_num_unreadable": float(written - read),
            "reward/judge_unreadable_share": (written - read) / max(written, 1),
        },
    )


class JudgeTokenizer(ChatTokenizer, Decoder, Protocol):
    """The judge's own tokenizer, which renders chats and decodes tokens."""


@dataclass(slots=True, kw_only=True)
class Judge:
    """Scores responses by a language model's judgements.

    A row's score is the mean of its readable judgements.  A row without any is a failure (bad_value), and so is one whose prompt
    is too long (bad_input).
    policy: decodes responses; tokenizer: the judge's; generate: see `Generate`.
    """

    config: JudgeConfig
    policy: Decoder
    tokenizer: JudgeTokenizer
    generate: Generate
    _prompt: JudgePrompt = field(init=False)
    _pattern: Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        self._prompt = read_prompt(self.config.prompt_template)
        self._pattern = read_pattern(self.config.score_pattern)

    def __call__(self, batch: DataProto) -> Judgements:
        """Judges all rows in one call of `generate`.

        batch: needs responses, response_length, the data's raw_chat and ground_truth, and NUMBER.
        """
        prompts = self.prompts(batch)
        fitting = [row for row, ids in enumerate(prompts) if len(ids) <= self.config.max_prompt_length]
        numbers = batch.batch[NUMBER].tolist()
        answers = self.generate([prompts[row] for row in fitting], [numbers[row] for row in fitting]) if fitting else []
        texts = {
            row: self.tokenizer.batch_decode(ids, skip_special_tokens=True) for row, ids in zip(fitting, answers, strict=True)
        }
        read = {row: [self._read(text) for text in texts[row]] for row in fitting}
        outcomes = [
            self._outcome(read[row], texts[row]) if row in read else self._too_long(len(ids)) for row, ids in enumerate(prompts)
        ]
        scores = [score for row in fitting for score in read[row]]
        return Judgements(pack_outcomes(outcomes), len(scores), sum(score is not None for score in scores))

    def prompts(self, batch: DataProto) -> list[list[int]]:
        """Returns the judge's prompt for each row, in its tokens."""
        columns = batch.non_tensor_batch
        filled = [
            self._prompt.fill(question=question_of(chat), response=response, ground_truth=str(truth))
            for chat, response, truth in zip(
                columns["raw_chat"], response_texts(batch, self.policy), columns["ground_truth"], strict=True
            )
        ]
        return [render(self.tokenizer, [{"role": "user", "content": text}], generation=True) for text in filled]

    def _read(self, text: str) -> float | None:
        return read_score(text, self._pattern, self.config.min_score, self.config.max_score)

    def _outcome(self, read: list[float | None], texts: list[str]) -> RewardOutcome:
        scores = [score for score in read if score is not None]
        if scores:
            return RewardOutcome(score=sum(scores) / len(scores))
        bounds = f"[{self.config.min_score:g}, {self.config.max_score:g}]"
        shown = texts[0][-SHOWN:] if texts else ""
        message = f"no number in {bounds} at reward_model.judge.score_pattern in the judgement, which ends in {shown!r}"
        return RewardOutcome(error=RewardFailure(kind="bad_value", message=message))

    def _too_long(self, length: int) -> RewardOutcome:
        limit = self.config.max_prompt_length
        message = f"the judge's prompt has {length} tokens, more than reward_model.judge.max_prompt_length={limit}"
        return RewardOutcome(error=RewardFailure(kind="bad_input", message=message))


def running_numbers(ordinals: Sequence[int]) -> list[int]:
    """Returns a number for each row, from its prompt's ordinal and its index among that prompt's samples alone."""
    counts: Counter[int] = Counter()
    numbers = []
    for ordinal in ordinals:
        numbers.append(ordinal * SAMPLES + counts[ordinal] % SAMPLES)
        counts[ordinal] += 1
    return numbers
