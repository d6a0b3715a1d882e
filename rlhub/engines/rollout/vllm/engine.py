"""RolloutEngine over vLLM in this process, where the same ranks train and generate.

With tensor parallelism each rank of a group runs its own scheduler on the same requests.  The schedules agree because the
requests, their order and their seeds do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from rlhub.engines.rollout.base import (
    Completion,
    Follow,
    GenerationRequest,
    SamplingParams,
    WeightBucket,
    resolve_dtype,
)
from rlhub.engines.rollout.continuous_batching import SteppedEngine, Stepper
from rlhub.engines.rollout.registry import KEY, VLLM_QUANTIZES_NO_FILES, RolloutSetup, vllm_recording_problems
from rlhub.engines.rollout.vllm.environment import QUANTIZED_VARIABLES, distributed_variables, guarded_process, settle
from rlhub.errors import EngineError
from rlhub.models.hf import check_weights
from rlhub.models.required_weights import refuse_nonfinite
from rlhub.protocol.weights.pieces import Piece

if TYPE_CHECKING:
    from rlhub.engines.rollout.vllm.entrypoints import InProcessLLM

DISCARD_WEIGHTS = 2  # vLLM's sleep level that keeps neither cache nor weights; the next update restores the weights
KEEP_WEIGHTS = 1  # the level that moves the weights to host memory: of a base that no update restores
SECOND_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "1"}  # the one that records experts, which vLLM takes for some models alone
SLEEPING_PARTS = ("weights", "kv_cache")  # vLLM's tags of the memory that sleep frees, in the order of waking


class VLLMEngine(SteppedEngine):
    """A RolloutEngine over one vLLM engine; a process can have only one, because vLLM's parallel state is global to the
    process."""

    def __init__(self, setup: RolloutSetup) -> None:
        super().__init__(setup)
        if setup.config.quantization and setup.reads_files:
            raise EngineError(f"{KEY}.quantization={setup.config.quantization}: {VLLM_QUANTIZES_NO_FILES}")
        self._dtype = resolve_dtype(setup.config.dtype, setup.device)
        self._llm: InProcessLLM | None = None
        self._asleep: list[str] = []  # the members of SLEEPING_PARTS that sleep at the moment
        self._weight_dtypes: dict[str, torch.dtype] = {}

    def initialize(self) -> None:
        """Builds vLLM.  All ranks of the job call it together when torch.distributed is initialized."""
        in_process_group = dist.is_initialized()
        world_size = dist.get_world_size() if in_process_group else 1
        if world_size % self._setup.config.tensor_model_parallel_size:
            raise EngineError(
                f"rollout.tensor_model_parallel_size {self._setup.config.tensor_model_parallel_size} does not divide the "
                f"{world_size} ranks of the job"
            )
        variables = distributed_variables(
            rank=dist.get_rank() if in_process_group else 0,
            world_size=world_size,
            local_rank=self._setup.device.index or 0,
        )
        if self._setup.config.quantization:
            variables |= QUANTIZED_VARIABLES
        if self._setup.routed_experts:
            if problems := vllm_recording_problems(self._setup.config, self._setup.device.type):
                raise EngineError("; ".join(problems))
            variables |= SECOND_RUNNER
        if self._setup.reads_files:
            check_weights(self._setup.model, "policy")
        with guarded_process(variables):
            # Imported only now: vLLM reads the environment while it is imported.
            from rlhub.engines.rollout.vllm.entrypoints import InProcessLLM

            self._llm = InProcessLLM(self._setup, self._dtype, in_process_group=in_process_group)
        model = self._setup.model
        if self._setup.reads_files:
            refuse_nonfinite(str(model.path), ((piece.name, piece.tensor) for piece in self.live_weights()))
        if self._setup.adapters:
            self._llm.add_adapter(model.lora_rank, model.target_modules)
        self._weight_dtypes = {piece.name: piece.tensor.dtype for piece in self.live_weights()}
        self._ready = self._setup.load_checkpoint

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Completion]:
        self._refuse_unready("generate")
        self._check(requests, params, routes=self._setup.routed_experts)
        if not requests:
            return []
        from rlhub.engines.rollout.vllm.conversion import completion_of, vllm_params

        vllm = self._running()
        with self._generating(), vllm.whole_batch() as llm:
            sampling = [vllm_params(request, params) for request in requests]
            prompts = [vllm.prompt(request) for request in requests]
            outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=vllm.adapter)
        return [completion_of(output, params, self.version, vllm.expert_layers) for output in outputs]

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        if self._setup.config.tensor_model_parallel_size > 1:
            raise EngineError(
                "single requests would be scheduled differently on each tensor-parallel rank: use generate (rollout.mode=sync) "
                "or rollout.tensor_model_parallel_size=1 with more replicas"
            )
        return await super().agenerate(request, params, follow)

    @property
    def vocab_size(self) -> int | None:
        return None if self._llm is None else self._llm.vocab_size

    @property
    def failure(self) -> str:
        return super().failure or ("" if self._llm is None else self._llm.failure)

    @property
    def _shapes(self) -> bool:
        return True

    @property
    def _ranks(self) -> bool:
        return True

    def _make_stepper(self) -> Stepper:
        self._running().check_steps()
        return self._running()

    def _refuse_unready(self, action: str) -> None:
        super()._refuse_unready(action)
        if self._asleep:
            raise EngineError(f"the engine's {' and '.join(self._asleep)} are asleep: wake_up comes before {action}")

    @torch.no_grad()
    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        with self.overwriting(version):
            self._running().load_stream(buckets, self._weight_dtypes)

    @contextmanager
    def overwriting(self, version: int) -> Iterator[None]:
        with self._updating():
            self._ready = False
            self.wake_up(weights_only=True)
            settle(self._setup.device)
            yield
            settle(self._setup.device)
            self._running().weights_changed()
            self._loop.weights_changed()
            self._ready, self.version = True, version

    def live_weights(self) -> Iterator[Piece]:
        return self._running().live_weights()

    def standby_weights(self) -> Iterator[Piece] | None:
        return None if self._asleep else self._running().standby.pieces()

    def exchange(self) -> None:
        self._running().standby.exchange()

    def weight_dtype(self, name: str) -> torch.dtype:
        return self._weight_dtypes[name]

    def sleep(self, *, keep_weights: bool = False) -> None:
        with self._loop.exclusive("sleep"):
            self._ready = False
            if self._running().can_sleep and not self._asleep:
                self._running().standby.free()
                kept = keep_weights or self._setup.adapters
                self._running().llm.sleep(level=KEEP_WEIGHTS if kept else DISCARD_WEIGHTS)
                self._asleep = list(SLEEPING_PARTS)

    def wake_up(self, *, weights_only: bool = False) -> None:
        parts = [part for part in self._asleep if part == "weights" or not weights_only]
        if parts:
            self._running().llm.wake_up(tags=parts)
            self._asleep = [part for part in self._asleep if part not in parts]

    def shutdown(self) -> None:
        self._loop.close()
        if self._llm is not None:
            self._llm.shut_down()
        self._llm, self._ready = None, False

    def _running(self) -> InProcessLLM:
        if self._llm is None:
            raise EngineError("the vLLM engine is not initialized, or was shut down")
        return self._llm
