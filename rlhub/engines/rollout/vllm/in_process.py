"""vLLM's LLM in this process, beside a trainer: built, fed with whole batches or step by step, shut down.

Imports vLLM: see `environment` for what must come first.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from vllm import LLM, RequestOutput, TokensPrompt
from vllm.inputs import tokens_input
from vllm.platforms import current_platform

from rlhub.engines.rollout.base import GenerationRequest, SamplingParams, WeightBucket
from rlhub.engines.rollout.continuous_batching import TokenEvent
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.vllm import internals
from rlhub.engines.rollout.vllm.arguments import engine_arguments
from rlhub.engines.rollout.vllm.conversion import finish_reason_of, log_probs_of, vllm_params
from rlhub.engines.rollout.vllm.environment import agree_on_stream, agree_on_threads, job_identity, own_stream
from rlhub.engines.rollout.vllm.weights import live_weights, load_weights
from rlhub.errors import EngineError
from rlhub.protocol.weights.pieces import Piece


class InProcessLLM:
    """A whole batch by vLLM's own `generate`, or a `Stepper` of single requests; one of the two at a time."""

    def __init__(self, setup: RolloutSetup, dtype: torch.dtype, *, in_process_group: bool) -> None:
        """in_process_group: torch.distributed is initialized, so ranks of this job form the tensor-parallel groups; without it
        vLLM makes a group of its own for this one process."""
        self.can_sleep = setup.config.free_cache_engine and bool(current_platform.is_sleep_mode_available())
        arguments = {
            **engine_arguments(setup, dtype),
            "enable_sleep_mode": self.can_sleep,
            "async_scheduling": False if setup.config.mode == "async" else None,  # else a step would always be computing
        }
        if in_process_group:
            arguments["distributed_executor_backend"] = "external_launcher"
        internals.keep_weights_unpacked()
        with internals.named_shared_memory(job_identity()):
            self.llm = LLM(**arguments)
        if in_process_group:
            internals.spare_process_group(self.llm)
        self._in_process_group = in_process_group
        self._devices = [setup.device] if setup.device.type == "cuda" else []
        self._stream = own_stream(setup.device)
        self._failure: BaseException | None = None
        self._salts = itertools.count()
        self.weights_changed()

    @property
    def model(self) -> nn.Module:
        """This rank's part of the model, live."""
        found: nn.Module = self.llm.apply_model(_itself)[0]
        return found

    @property
    def vocab_size(self) -> int:
        """The number of token ids that the model reads."""
        return int(self.llm.model_config.get_vocab_size())

    @property
    def failure(self) -> str:
        """The error of a step, after which no request is taken; "" without one."""
        return "" if self._failure is None else f"{type(self._failure).__name__}: {self._failure}"

    @property
    def _concurrent_steps(self) -> int:
        """How many steps vLLM schedules before the first of them has ended."""
        return int(self.llm.llm_engine.vllm_config.max_concurrent_batches)

    def load_weights(self, bucket: WeightBucket) -> None:
        """Writes full tensors with Hugging Face names; each rank takes its part."""
        load_weights(self.model, bucket)

    def live_weights(self) -> Iterator[Piece]:
        """Yields this rank's parameters as views under Hugging Face names."""
        return live_weights(self.model)

    def weights_changed(self) -> None:
        """Lets no later request find a cached prefix of the old weights: it has another salt.  Running ones keep their blocks."""
        self._salt = f"weights-{next(self._salts)}"

    # -- whole batches -----------------------------------------------------------------------------------------------------

    def prompt(self, request: GenerationRequest) -> TokensPrompt:
        """Returns the request's prompt, for the weights of now."""
        return TokensPrompt(prompt_token_ids=list(request.prompt_ids), cache_salt=self._salt)

    @contextmanager
    def whole_batch(self) -> Iterator[LLM]:
        """Gives the LLM for one call of `generate`, in whatever thread.

        Nothing of the requests is left in it afterwards, also after an error, unless a step failed: then it takes no more.
        """
        self._refuse_failed()
        agree_on_threads()
        agree_on_stream(self._stream)
        with torch.random.fork_rng(devices=self._devices):  # it draws from the global generator too
            try:
                yield self.llm
            except BaseException as error:
                if self.llm.llm_engine.has_unfinished_requests():
                    self._failure = error  # the scheduler believes that their step was computed, and has cached it
                raise
            finally:
                # A step may be ahead of the last token, and only the next one tells the model which requests ended.
                for _ in range(self._concurrent_steps + 1 if self._failure is None else 0):
                    self._step()

    def _step(self) -> list[RequestOutput]:
        try:
            outputs: list[RequestOutput] = self.llm.llm_engine.step()
        except BaseException as error:
            self._failure = error
            raise
        return outputs

    def _refuse_failed(self) -> None:
        if self._failure is not None:
            raise EngineError(f"vLLM failed in a step and must be built again: {self._failure}") from self._failure

    # -- single requests: see Stepper --------------------------------------------------------------------------------------

    def check_steps(self) -> None:
        """Raises EngineError if single requests could not be interrupted between two steps."""
        if self._concurrent_steps > 1:
            raise EngineError(
                "vLLM schedules a step ahead of the one that runs, so single requests could not be interrupted between two: "
                "set rollout.mode=async"
            )

    def add(self, key: int, request: GenerationRequest, params: SamplingParams) -> None:
        self._refuse_failed()
        prompt = tokens_input(list(request.prompt_ids), cache_salt=self._salt)  # as `prompt`, past the renderer
        self.llm.llm_engine.add_request(str(key), prompt, vllm_params(request, params, stream=True))

    def step(self) -> Sequence[TokenEvent]:
        agree_on_threads()
        agree_on_stream(self._stream)
        events = []
        for output in self._step():
            part = output.outputs[0]
            reason = finish_reason_of(part) if output.finished else None
            last = len(part.token_ids) - 1
            events += [
                TokenEvent(int(output.request_id), token, log_prob, reason if i == last else None)
                for i, (token, log_prob) in enumerate(zip(part.token_ids, log_probs_of(part), strict=True))
            ]
        return events

    def remove(self, keys: Collection[int]) -> None:
        self.llm.llm_engine.abort_request([str(key) for key in keys])

    def recompute(self) -> None:
        """Sends all running requests back to the waiting ones, which have no keys and values."""
        if not self.llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM did not give up the keys and values of the running requests")

    def shut_down(self) -> None:
        """Releases the engine, and leaves the job's process group alone."""
        internals.shut_down(self.llm, keep_process_group=self._in_process_group)


def _itself(model: nn.Module) -> nn.Module:
    return model
