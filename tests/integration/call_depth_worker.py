"""For test_call_depth: a rollout worker whose vLLM is entered, but has no model."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import rlhub
from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.vllm.engine import VLLMEngine
from rlhub.models.tokenizer import Vocabulary
from rlhub.single_controller import Dispatch, register
from rlhub.workers.memory_handover import WorkerRuntime
from rlhub.workers.rollout import RolloutPart

PACKAGE = str(Path(rlhub.__file__).parent)
SEED, TOKENS, TOKEN, LOG_PROB = 0, 1, 5, -0.5


def frames() -> list[str]:
    """The frames of rlhub's own files above the caller, `file:function`, the outermost first."""
    found = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            found.append(f"{frame.f_code.co_filename.removeprefix(PACKAGE)[1:]}:{frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return found[::-1]


class EnteredRollout(RolloutPart):
    """Its engine is the product's; only LLM.generate is replaced, by what notes the frames it was called from."""

    def __init__(self) -> None:
        self.config = ActorRolloutRefConfig()
        self.runtime = WorkerRuntime(device="cpu", seed=SEED, max_prompt_length=8, max_response_length=TOKENS)
        self.device = torch.device("cpu")
        self.records_experts = False
        self.vocabulary = Vocabulary(size=16, stop_token_ids=(2,), pad_id=0)
        self.rollout = VLLMEngine(
            RolloutSetup(
                config=self.config.rollout,
                model=self.config.model,
                device=self.device,
                seed=SEED,
                max_prompt_length=8,
                max_response_length=TOKENS,
            )
        )
        self.entered: list[str] = []
        self._enter_without_a_model(self.rollout)
        self._register_dispatch_collect_info("rollout", self.rank, True)

    def _enter_without_a_model(self, engine: VLLMEngine) -> None:
        from vllm import LLM
        from vllm.logprobs import FlatLogprobs

        from rlhub.engines.rollout.vllm.entrypoints import InProcessLLM

        def generate(_: LLM, prompts: list[Any], *__: Any, **___: Any) -> list[Any]:
            self.entered = frames()
            ends = list(range(1, TOKENS + 1))
            places = {"start_indices": [end - 1 for end in ends], "end_indices": ends}
            log_probs = FlatLogprobs(token_ids=[TOKEN] * TOKENS, logprobs=[LOG_PROB] * TOKENS, **places)
            part = SimpleNamespace(token_ids=[TOKEN] * TOKENS, logprobs=log_probs, finish_reason="length")
            return [SimpleNamespace(outputs=[part], prompt_logprobs=None, finished=True)] * len(prompts)

        LLM.generate = generate
        core = SimpleNamespace(has_unfinished_requests=lambda: False, step=list)
        core.vllm_config = SimpleNamespace(max_concurrent_batches=1)
        vllm = InProcessLLM.__new__(InProcessLLM)
        vllm.llm = LLM.__new__(LLM)
        vllm.llm.llm_engine = core
        vllm.llm.model_config = SimpleNamespace(get_vocab_size=lambda: self.vocabulary.size)
        vllm._salt, vllm._failure, vllm._stream, vllm._devices, vllm.adapter = "weights-0", None, None, [], None
        vllm.expert_layers = []
        engine._llm, engine._ready = vllm, True

    def _widest(self, width: int) -> int:
        return width

    @register(Dispatch.ONE_TO_ALL)
    def frames_of_vllms_caller(self) -> list[str]:
        """The worker's frames between the actor's method and vLLM, in the last call."""
        return self.entered
