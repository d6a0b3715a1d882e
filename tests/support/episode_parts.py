"""What tests of workflows share: an engine that says what it is told to, and parts around a ChatML tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerFast

from rlhub.agents.trajectory import Trajectory
from rlhub.agents.workflows.base import EpisodeData, RolloutWorkflow, WorkflowParts
from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from tests.support.chatml import chatml_tokenizer

LOG_PROB = -0.25


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return chatml_tokenizer()


def tokens_of(text: str) -> list[int]:
    return list(tokenizer()(text, add_special_tokens=False)["input_ids"])


@dataclass(slots=True, kw_only=True)
class ScriptedEngine:
    """Says `replies` one after the other, each token with its turn's number as version; remembers what it was asked."""

    replies: Sequence[str]
    end: bool = True
    requests: list[GenerationRequest] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)

    async def agenerate(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        turn = len(self.requests)
        self.requests.append(request)
        self.limits.append(params.max_new_tokens)
        await asyncio.sleep(0)
        tokens = tokens_of(self.replies[turn]) + ([tokenizer().eos_token_id] if self.end else [])
        cut = tokens[: params.max_new_tokens]
        return Completion(
            token_ids=cut,
            log_probs=[LOG_PROB] * len(cut),
            finish_reason="stop" if len(cut) == len(tokens) else "length",
            versions=[turn] * len(cut),
        )


async def nothing(row: Mapping[str, Any], text: str) -> tuple[float, dict[str, float]]:
    raise AssertionError("this workflow does not score")


def parts(
    *, budget: int = 2000, score: Callable[..., Awaitable[Any]] = nothing, limit: int = 2000, **kwargs: Any
) -> WorkflowParts:
    return WorkflowParts(
        tokenizer=tokenizer(),
        sampling=SamplingParams(max_new_tokens=budget, stop_token_ids=(tokenizer().eos_token_id,)),
        max_prompt_length=limit,
        max_response_length=budget,
        score=score,
        kwargs=kwargs,
    )


def episode(question: str = "What is 2+2?", **row: Any) -> EpisodeData:
    chat = [{"role": "user", "content": question}]
    text = tokenizer().apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    columns = {"raw_chat": chat, "raw_prompt": text, "data_source": "test", "ground_truth": "4", "extra_info": {}, **row}
    return EpisodeData(prompt_ids=tuple(tokens_of(text)), ordinal=3, sample=1, seed=77, row=columns)


def run(workflow: RolloutWorkflow, engine: Any, data: EpisodeData | None = None) -> Trajectory:
    async def once() -> Trajectory | None:
        try:
            return await workflow.arun_episode(engine, data or episode())
        finally:
            await workflow.aclose()

    trajectory = asyncio.run(once())
    assert trajectory is not None
    trajectory.check()
    return trajectory


def written(trajectory: Trajectory) -> list[str]:
    """The response as stretches of text, alternately the policy's and others', the policy's first."""
    stretches: list[list[int]] = []
    for position, (token, mine) in enumerate(zip(trajectory.response_ids, trajectory.response_mask, strict=True)):
        if position == 0 or mine != trajectory.response_mask[position - 1]:
            stretches.append([])
        stretches[-1].append(token)
    return [tokenizer().decode(stretch, skip_special_tokens=False) for stretch in stretches]
