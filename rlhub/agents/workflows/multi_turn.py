"""multi_turn: the policy answers, is told when its answer is not right, and tries again.

Each answer is scored by the run's reward function; the episode's reward is that of the last answer, less for each try before
it, so that being right at once stays best.
"""

from __future__ import annotations

from rlhub.agents.trajectory import Trajectory
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow, WorkflowParts
from rlhub.agents.workflows.knobs import MultiTurnKnobs
from rlhub.agents.workflows.registry import fill_knobs
from rlhub.agents.workflows.turns import Transcript, TurnTemplate


class MultiTurn(RolloutWorkflow):
    """Retry with feedback."""

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
