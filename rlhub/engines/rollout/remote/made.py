"""What there is of a request's completion so far, over all the attempts at it, and who follows it."""

from __future__ import annotations

from dataclasses import replace

from rlhub.engines.rollout.base import Completion, FinishReason, GenerationRequest, Progress, SamplingParams
from rlhub.engines.rollout.follower import Follower


class Made:
    """completion: its reason is "abort" until the end is known.  follower: None: nobody follows."""

    def __init__(self, request: GenerationRequest, params: SamplingParams, follower: Follower | None) -> None:
        self._request, self._params = request, params
        self.follower = follower
        self.completion = Completion(token_ids=[], log_probs=[], finish_reason="abort", versions=[])

    def __len__(self) -> int:
        return len(self.completion.token_ids)

    @property
    def rest(self) -> GenerationRequest:
        """What is still to be asked for."""
        start = self._request.start + len(self)
        return replace(self._request, prompt_ids=[*self._request.prompt_ids, *self.completion.token_ids], start=start)

    def add(self, part: Progress | Completion) -> None:
        """More tokens; the follower is told of them, and of the reason where it is the last."""
        self.completion.token_ids += part.token_ids
        self.completion.log_probs += part.log_probs
        self.completion.versions += part.versions
        if self.follower is not None:
            # What a pause ended goes on.
            ended = part.finish_reason if part.finish_reason != "abort" else None
            told = Progress(token_ids=part.token_ids, log_probs=part.log_probs, versions=part.versions, finish_reason=ended)
            self.follower.tell(told)

    def ended(self, max_model_len: int) -> FinishReason | None:
        """Why there is nothing more to ask for, by the tokens alone; None where there is."""
        tokens, params = self.completion.token_ids, self._params
        if tokens and tokens[-1] in params.stop_token_ids and not params.ignore_eos:
            return "stop"
        full = self._request.start + len(self) >= params.max_new_tokens or len(self.rest.prompt_ids) >= max_model_len
        return "length" if full else None
