"""Episodes in turns, on tokens: the single-turn and multi-turn workflows, and the transcript and chat template of all
conversations.

Token in, token out: the tokens that the policy wrote stay as they were sampled.  Between two of its turns stand the tokens that
the template adds: the rest of the turn's end, the messages of tools or users, and the header of the next turn.  TurnTemplate
finds that text by rendering a short conversation with a marked answer in it, and tokenizes nothing else.

    SingleTurn    single_turn: one generation is the whole response; the run's reward function scores it.
    MultiTurn     multi_turn: the policy answers, reads feedback when the answer is wrong, and tries again.
    Transcript    the tokens of a conversation so far, with their mask, log-probs, versions and rewards.
    TurnTemplate  the tokens that the chat template adds around and between turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jinja2

from rlhub.agents.partials import join
from rlhub.agents.trajectory import NOT_SAMPLED, FinishReason, Trajectory, last_written
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow, WorkflowParts
from rlhub.agents.workflows.knobs import MultiTurnKnobs
from rlhub.agents.workflows.registry import fill_knobs
from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.errors import ConfigError, DataError
from rlhub.utils.aio.results import Reject
from rlhub.utils.seeding import sample_seed
from rlhub.utils.tool_calls import ToolSchema, schema_name

Message = Mapping[str, Any]
ANSWER = "rlhub-answer-mark"  # stands for what the policy wrote; no template writes it by itself
KEPT_PROMPTS = 256  # rendered with their tools: the samples of a prompt begin at about the same time
PROBE = {"role": "user", "content": "question"}


class SingleTurn(RolloutWorkflow):
    """Generates one response to the prompt and returns it as the trajectory."""

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory | None:
        completion = await self._complete(engine, data)
        if completion.finish_reason == "abort":
            raise Reject("its generation was aborted")
        return Trajectory(
            prompt_ids=list(data.prompt_ids),
            response_ids=completion.token_ids,
            response_mask=[1] * len(completion.token_ids),
            rollout_log_probs=completion.log_probs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
        )

    async def _complete(self, engine: EpisodeEngine, data: EpisodeData) -> Completion:
        """Generates the response.  In a resumed run it continues from the tokens that were saved."""
        request, before = self.request(data), data.partial
        if before is None:
            return await engine.agenerate(request, self.parts.sampling)
        if before.finish_reason != "abort":
            return before
        request = replace(request, prompt_ids=[*data.prompt_ids, *before.token_ids], start=len(before.token_ids))
        return join(before, await engine.agenerate(request, self.parts.sampling))


class MultiTurn(RolloutWorkflow):
    """Lets the policy try again after feedback, until its answer is good enough or the turns are used up.

    The run's reward function scores each answer.  The episode's reward is that of the last answer, multiplied by turn_discount
    for each earlier one, so that an immediately right answer earns most.
    """

    def __init__(self, parts: WorkflowParts) -> None:
        super().__init__(parts)
        self._knobs = fill_knobs(MultiTurnKnobs, parts.kwargs)
        self._template = TurnTemplate(parts.tokenizer, roles=["user"], kwargs=self._knobs.chat_template_kwargs)
        self._again = [{"role": "user", "content": self._knobs.feedback}]

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory | None:
        transcript = Transcript(prompt_ids=list(data.prompt_ids), budget=self.parts.max_response_length, scored=True)
        knobs = self._knobs
        while True:
            completion = await transcript.generate(engine, data, self.parts.sampling, most=knobs.max_turn_tokens)
            reward, _ = await self.parts.score(data.row, self._template.text(completion.token_ids))
            if reward >= knobs.good_enough or not knobs.may_go_on(transcript.num_turns):
                break
            between = self._template.between(self._again, turn_ended=self._template.ended(completion.token_ids))
            if not transcript.add_context(between):
                break
        tries = transcript.num_turns
        transcript.add_reward(reward * knobs.turn_discount ** (tries - 1))
        right = float(reward >= knobs.good_enough)
        return transcript.trajectory({"right_at_once": right * (tries == 1), "right_at_last": right})


@dataclass(slots=True, kw_only=True)
class Transcript:
    """The tokens of an episode so far.

    budget: the maximum number of response tokens, including those that the policy did not write.  scored: the workflow gives the
    rewards, which replace the configured ones; all episodes of a run must agree in this.  If False, the rewards are added to the
    configured ones.
    """

    prompt_ids: list[int]
    budget: int
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    scored: bool = False
    num_turns: int = 0
    finish_reason: FinishReason = "length"

    @property
    def remaining(self) -> int:
        """Returns the number of response tokens that still fit."""
        return self.budget - len(self.response_ids)

    async def generate(
        self, engine: EpisodeEngine, data: EpisodeData, params: SamplingParams, *, most: int | None = None
    ) -> Completion:
        """Generates the policy's next turn and appends it; `most` limits the turn below the remaining budget.

        Raises Reject if the generation was aborted.
        """
        before = data.partial if self.num_turns == 0 else None
        written = before.token_ids if before is not None else []
        completion = before
        if before is None or before.finish_reason == "abort":
            request = GenerationRequest(
                prompt_ids=(*self.prompt_ids, *self.response_ids, *written),
                seed=turn_seed(data.seed, self.num_turns),
                session=data.session,
                start=len(written),
            )
            limit = min(self.remaining, most or self.remaining)
            after = await engine.agenerate(request, replace(params, max_new_tokens=limit))
            completion = after if before is None else join(before, after)
        assert completion is not None
        if completion.finish_reason == "abort":
            raise Reject("its generation was aborted")
        self.add_completion(completion)
        return completion

    def add_completion(self, completion: Completion) -> None:
        """Appends a turn of the policy."""
        count = len(completion.token_ids)
        log_probs = completion.log_probs or [0.0] * count  # engines omit them where nothing trains (validation)
        self._add(completion.token_ids, [1] * count, log_probs, completion.versions)
        self.finish_reason = completion.finish_reason
        self.num_turns += 1

    def add_context(self, tokens: Sequence[int]) -> bool:
        """Appends tokens that the policy did not write.  Returns False and appends nothing if no token of the policy would fit
        after them; then the episode ends."""
        if len(tokens) >= self.remaining:
            self.finish_reason = "length"
            return False
        self._add(tokens, [0] * len(tokens), [0.0] * len(tokens), [NOT_SAMPLED] * len(tokens))
        return True

    def _add(self, tokens: Sequence[int], mask: list[int], log_probs: Sequence[float], versions: Sequence[int]) -> None:
        self.response_ids += tokens
        self.response_mask += mask
        self.log_probs += log_probs
        self.versions += versions
        self.rewards += [0.0] * len(tokens)

    def add_reward(self, reward: float) -> None:
        """Adds a reward to the last token that the policy wrote.  Raises Reject if it wrote none."""
        last = last_written(self.response_mask)
        if last is None:
            raise Reject("the policy wrote no token that a reward could credit")
        self.rewards[last] += reward

    def trajectory(self, metrics: Mapping[str, float]) -> Trajectory:
        """Returns the episode for training.  `num_turns` is added to the metrics."""
        return Trajectory(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            response_mask=self.response_mask,
            rollout_log_probs=self.log_probs,
            versions=self.versions,
            finish_reason=self.finish_reason,
            rewards=self.rewards if self.scored else None,
            added_rewards=self.rewards if any(self.rewards) and not self.scored else None,
            metrics={"num_turns": float(self.num_turns), **metrics},
        )


def turn_seed(seed: int, turn: int) -> int:
    """Returns the seed of generation number `turn` of an episode; the first generation uses the episode's own seed."""
    return seed if turn == 0 else sample_seed(seed, turn, 0)


class TurnTemplate:
    """Renders what a chat template adds to a conversation that exists as tokens."""

    def __init__(self, tokenizer: Any, *, roles: Sequence[str], kwargs: Mapping[str, Any] | None = None) -> None:
        """Checks the template.  roles: the roles that answer the policy in this workflow.  kwargs: variables of the chat
        template.

        Raises ConfigError if the template cannot continue after a message of one of these roles, or if it rewrites earlier turns.
        """
        self._tokenizer, self._kwargs = tokenizer, dict(kwargs or {})
        self._prompts: dict[str, list[int]] = {}
        if not tokenizer.chat_template:
            raise ConfigError(
                "episodes of several turns need a chat template, and the tokenizer has none; use a tokenizer with one "
                "(chat_template.jinja beside the model), or the single-turn workflow"
            )
        self._end = tokenizer.eos_token or ""
        self._special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        for role in roles:
            self._check(role)

    def between(self, messages: Sequence[Message], *, turn_ended: bool = True) -> list[int]:
        """Returns the tokens between a turn of the policy and its next one, with `messages` in between.

        turn_ended: the policy sampled the end-of-turn token itself; otherwise these tokens contain it.
        """
        text = self._after_answer(messages)
        if turn_ended and self._end:
            text = text.removeprefix(self._end)
        return self._tokens(text)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None) -> str:
        """Returns the text of a conversation up to the position where the policy's turn begins."""
        return self._render([dict(message) for message in messages], generation=True, tools=tools)

    def prompt_ids(self, data: EpisodeData, tools: Sequence[ToolSchema], limit: int) -> list[int]:
        """Returns the prompt with the tools described by the template, or the row's own tokens where that changes nothing.

        Only chat prompts can be rendered again: a prompt given as text describes its tools itself.
        """
        chat = data.row.get("raw_chat")
        if not tools or not isinstance(chat, list | tuple):
            return list(data.prompt_ids)
        key = repr((data.row.get("raw_prompt") or chat, [schema_name(tool) for tool in tools]))
        if key not in self._prompts:
            if len(self._prompts) >= KEPT_PROMPTS:
                del self._prompts[next(iter(self._prompts))]
            self._prompts[key] = self._described(data, chat, tools, limit)
        return list(self._prompts[key])

    def _described(self, data: EpisodeData, chat: Sequence[Message], tools: Sequence[ToolSchema], limit: int) -> list[int]:
        messages = [{"content": "", **{key: value for key, value in message.items() if value is not None}} for message in chat]
        text = self.prompt(messages, tools)
        if text == data.row.get("raw_prompt"):
            return list(data.prompt_ids)
        return self.limited_ids(text, limit)

    def limited_ids(self, text: str, limit: int) -> list[int]:
        """Returns the tokens of a rendered prompt.  Raises DataError if there are more than `limit`."""
        tokens = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(tokens) > limit:
            raise DataError(
                f"with what the workflow adds (tools, first observation) the prompt has {len(tokens)} tokens, over "
                f"data.max_prompt_length={limit}; raise it"
            )
        return tokens

    def ended(self, token_ids: Sequence[int]) -> bool:
        """Returns whether these tokens of the policy end with its end-of-turn token."""
        return bool(token_ids) and token_ids[-1] == self._tokenizer.eos_token_id

    def text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of the policy's tokens, without the end of its turn."""
        kept = token_ids[:-1] if self.ended(token_ids) else token_ids
        return str(self._tokenizer.decode(list(kept), skip_special_tokens=False))

    def neutral(self, text: str) -> str:
        """Returns text from outside with all special tokens broken up, so that a tool's output cannot end its own turn."""
        for token in self._special:
            if token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _after_answer(self, messages: Sequence[Message]) -> str:
        rendered = self._render([PROBE, _answer(), *map(dict, messages)], generation=True)
        before, _, after = rendered.partition(ANSWER)
        if not after:
            raise ConfigError(f"the chat template drops an answer once it is followed by {_roles(messages)}: {rendered!r:.200}")
        return after.lstrip(" ") if self._end and after.lstrip(" ").startswith(self._end) else after

    def _tokens(self, text: str) -> list[int]:
        """Tokenizes text as it follows an end-of-turn token: many tokenizers treat the beginning of a text differently."""
        end_id = self._tokenizer.eos_token_id
        if self._end:
            anchored = list(self._tokenizer(self._end + text, add_special_tokens=False)["input_ids"])
            if anchored and anchored[0] == end_id:
                return anchored[1:]
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _check(self, role: str) -> None:
        """Raises ConfigError unless the template leaves earlier turns unchanged when it is given more turns."""
        said = {"role": role, "content": "reply"}
        shorter = self._render([PROBE, _answer(), said], generation=False)
        longer = self._render([PROBE, _answer(), said, {"role": "assistant", "content": "more"}, said], generation=False)
        if not longer.startswith(shorter):
            raise ConfigError(
                f"the chat template rewrites earlier turns when others follow ({role} messages): {shorter!r:.160} became "
                f"{longer!r:.200}; multi-turn training needs a template that only adds"
            )
        if not self.between([said]):
            raise ConfigError(f"the chat template adds nothing for {role} messages")

    def _render(self, messages: list[dict[str, Any]], *, generation: bool, tools: Sequence[ToolSchema] | None = None) -> str:
        described = {"tools": list(tools)} if tools else {}
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=generation, **described, **self._kwargs
                )
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ConfigError(f"the chat template refuses a conversation with {_roles(messages)}: {error}") from error


def _answer() -> dict[str, Any]:
    return {"role": "assistant", "content": ANSWER}


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(str(message["role"]) for message in messages) + " messages"
