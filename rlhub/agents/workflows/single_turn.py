"""single_turn: one generation is the whole response, scored by the run's configured reward."""

from __future__ import annotations

from dataclasses import replace

from rlhub.agents.partials import join
from rlhub.agents.trajectory import Trajectory
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow
from rlhub.engines.rollout.base import Completion
from rlhub.utils.aio.results import Reject


class SingleTurn(RolloutWorkflow):
    """Token in, token out."""

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
        """The generation, which goes on from what an earlier life of the run has written of it."""
        request, before = self.request(data), data.partial
        if before is None:
            return await engine.agenerate(request, self.parts.sampling)
        if before.finish_reason != "abort":
            return before
        request = replace(request, prompt_ids=[*data.prompt_ids, *before.token_ids], start=len(before.token_ids))
        return join(before, await engine.agenerate(request, self.parts.sampling))
