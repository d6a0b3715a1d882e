"""vLLM's scheduler, in its engine core, that keeps to a file: see step_limit."""

from __future__ import annotations

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.step_limit import at_limit


class LimitedScheduler(Scheduler):
    """It schedules nothing at the limit, as while it is paused."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        most = max((request.num_output_tokens for request in self.running), default=0)
        if not at_limit(most, len(self.running) + len(self.waiting)):
            return super().schedule(throttle_prefills)
        state, self._pause_state = self._pause_state, PauseState.PAUSED_ALL
        try:
            return super().schedule(throttle_prefills)
        finally:
            self._pause_state = state
