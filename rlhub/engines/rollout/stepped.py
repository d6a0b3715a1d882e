"""The half of a rollout engine that is the same for all engines driven step by step: single requests, pausing, readiness."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from rlhub.engines.rollout.base import Completion, Follow, GenerationRequest, RolloutEngine, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.requests import check_requests
from rlhub.engines.rollout.stepping import EngineLoop, Stepper
from rlhub.errors import EngineError


class SteppedEngine(RolloutEngine):
    """Subclasses set `_ready`: whether there is a whole set of weights, awake."""

    def __init__(self, setup: RolloutSetup) -> None:
        self.version = -1
        self._setup = setup
        self._ready = False
        self._loop = EngineLoop(self._make_stepper, lambda: self.version)

    @abstractmethod
    def _make_stepper(self) -> Stepper:
        """Called once, with the first single request."""

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        if not self._loop.paused:  # else it waits, with those that are there, for the weights
            self._refuse_unready("generate")
        self._check([request], params)
        return await self._loop.generate(request, params, follow)

    @property
    def load(self) -> int:
        return self._loop.load

    @property
    def failure(self) -> str:
        return self._loop.failure

    def pause(self) -> None:
        self._loop.pause()

    def resume(self, *, recompute: bool = True) -> None:
        if self._loop.paused:
            self._refuse_unready("resume")
        self._loop.resume(recompute=recompute)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self._loop.abort(request_ids)

    def _refuse_unready(self, action: str) -> None:
        if not self._ready:
            raise EngineError(
                f"the engine has no whole set of weights: initialize, wake_up and update_weights come before {action}"
            )

    def _check(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> None:
        check_requests(requests, params, max_model_len=self._setup.max_model_len, vocab_size=self.vocab_size)

    def _generating(self) -> AbstractContextManager[None]:
        """Around a whole batch."""
        return self._loop.exclusive("generate")

    def _updating(self) -> AbstractContextManager[None]:
        """Around a weight update."""
        return self._loop.exclusive("the weight update", among_requests=True)
