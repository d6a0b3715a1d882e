"""A language model as judge (Zheng et al. 2023, arXiv 2306.05685): it is asked for a number in words, which is read back.

What it writes is matched against a regular expression and never evaluated.  The engine behind it is a rollout engine that
the judge worker owns: this file is given a `generate` callable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from re import Pattern
from typing import Protocol

from rlhub.config.sections.reward import JudgeConfig
from rlhub.protocol import DataProto
from rlhub.rewards.base import Decoder
from rlhub.rewards.combine import PartScores
from rlhub.rewards.judge_prompt import JudgePrompt, read_pattern, read_prompt, read_score
from rlhub.rewards.pool import RewardFailure, RewardOutcome
from rlhub.rewards.rendering import ChatTokenizer, question_of, render, response_texts

Generate = Callable[[Sequence[Sequence[int]], Sequence[int]], Awaitable[list[list[list[int]]]]]
"""(prompts, a running number of each for its noise) -> for each prompt the token ids of JudgeConfig.n completions."""
SAMPLES = 1 << 12  # responses to one prompt that get noise of their own
SHOWN = 200  # characters of an unreadable judgement in a message


class JudgeTokenizer(ChatTokenizer, Decoder, Protocol):
    """The judge's own tokenizer, in both directions."""


@dataclass(slots=True, kw_only=True)
class Judge:
    """policy: decodes responses.  tokenizer: the judge's.  generate: see `Generate`.

    A row's score is the mean over its readable judgements; a row without any is a failure (bad_value), and so is one whose
    question is too long (bad_input).
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

    async def __call__(self, batch: DataProto) -> PartScores:
        """Judges every row, all in one call of `generate`."""
        prompts = self.prompts(batch)
        fitting = [row for row, ids in enumerate(prompts) if len(ids) <= self.config.max_prompt_length]
        numbers = running_numbers(batch.batch["ordinal"].tolist())
        answers = await self.generate([prompts[row] for row in fitting], [numbers[row] for row in fitting]) if fitting else []
        texts = {
            row: self.tokenizer.batch_decode(ids, skip_special_tokens=True) for row, ids in zip(fitting, answers, strict=True)
        }
        read = {row: [self._read(text) for text in texts[row]] for row in fitting}
        outcomes = [
            self._outcome(read[row], texts[row]) if row in read else self._too_long(len(ids)) for row, ids in enumerate(prompts)
        ]
        scores = [score for row in fitting for score in read[row]]
        unreadable = sum(score is None for score in scores)
        return PartScores(
            outcomes=outcomes,
            metrics={
                "reward/judge_num_unreadable": float(unreadable),
                "reward/judge_unreadable_share": unreadable / max(len(scores), 1),
            },
        )

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
    """Returns a number for each row by its prompt's place in the run and its place among that prompt's samples alone."""
    counts: Counter[int] = Counter()
    numbers = []
    for ordinal in ordinals:
        numbers.append(ordinal * SAMPLES + counts[ordinal] % SAMPLES)
        counts[ordinal] += 1
    return numbers
