"""RolloutEngine over a Hugging Face model that lives in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams, WeightBucket, apply_buckets, resolve_dtype
from rlhub.engines.rollout.continuous_batching import SteppedEngine, Stepper
from rlhub.engines.rollout.hf.continuous_batch import ContinuousBatch
from rlhub.engines.rollout.hf.decode import DecodeLimits, decode
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.errors import EngineError
from rlhub.models.experts import unfused_tensors
from rlhub.models.required_weights import load_checked
from rlhub.protocol.weights.pieces import Piece, whole_piece


class HFEngine(SteppedEngine):
    """One copy of the model a rank; no tensor parallelism.  `sleep` frees nothing: the cache lives only during generate."""

    def __init__(self, setup: RolloutSetup) -> None:
        if setup.config.tensor_model_parallel_size != 1:
            raise EngineError(
                f"the hf rollout engine has no tensor parallelism, but rollout.tensor_model_parallel_size is "
                f"{setup.config.tensor_model_parallel_size}; set it to 1 or use rollout.name=vllm"
            )
        super().__init__(setup)
        self._dtype = resolve_dtype(setup.config.dtype, setup.device)
        self._model: PreTrainedModel | None = None
        self._weights: dict[str, Tensor] = {}

    def initialize(self) -> None:
        with torch.random.fork_rng(devices=[self._setup.device] if self._setup.device.type == "cuda" else []):
            self._model = self._build()
        self._weights = _named_weights(self._model)
        self._ready = self._setup.load_checkpoint

    def _build(self) -> PreTrainedModel:
        setup = self._setup
        trust = setup.model.trust_remote_code
        config = AutoConfig.from_pretrained(setup.model.path, trust_remote_code=trust, **setup.model.override_config)
        _refuse_short_windows(config, setup.max_model_len)
        options = {"dtype": self._dtype, "trust_remote_code": trust}
        if setup.load_checkpoint:
            model = load_checked(AutoModelForCausalLM, str(setup.model.path), config, "policy", **options)
        else:
            with no_init_weights():  # the first update overwrites every weight
                model = AutoModelForCausalLM.from_config(config, **options)
            model.tie_weights()
        return model.to(setup.device).requires_grad_(False).eval()

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Completion]:
        self._refuse_unready("generate")
        self._check(requests, params)
        with self._generating():
            return self._generate(requests, params)

    def _generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Completion]:
        """Generates in batches of requests of similar length, equal prompts together."""
        assert self._model is not None
        limits, max_rows = self._limits(), self._setup.config.max_num_seqs
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt_ids), list(requests[i].prompt_ids)))
        completions: dict[int, Completion] = {}
        for first in range(0, len(order), max_rows):
            indices = order[first : first + max_rows]
            batch = decode(self._model, [requests[i] for i in indices], params, limits)
            for index, completion in zip(indices, batch, strict=True):
                completion.versions = [self.version] * len(completion.token_ids)
                completions[index] = completion
        return [completions[i] for i in range(len(requests))]

    @property
    def vocab_size(self) -> int | None:
        return None if self._model is None else int(self._model.get_input_embeddings().weight.shape[0])

    def _make_stepper(self) -> Stepper:
        assert self._model is not None, "single requests are refused before"
        return ContinuousBatch(self._model, self._limits(), self._setup.config.max_num_seqs)

    def _limits(self) -> DecodeLimits:
        config = self._setup.config
        return DecodeLimits(max_model_len=self._setup.max_model_len, max_prefill_tokens=config.max_num_batched_tokens)

    @torch.no_grad()
    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        with self.overwriting(version):
            apply_buckets(buckets, self._weights, self._copy)

    def _copy(self, bucket: WeightBucket) -> None:
        for name, tensor in bucket:
            target = self._weights[name]
            if target.shape != tensor.shape:
                raise EngineError(f"weight {name} has shape {tuple(tensor.shape)}, the engine's has {tuple(target.shape)}")
            target.copy_(tensor)

    @contextmanager
    def overwriting(self, version: int) -> Iterator[None]:
        with self._updating():
            self._ready = False
            yield
            self._loop.weights_changed()
            self._ready, self.version = True, version

    def live_weights(self) -> Iterator[Piece]:
        for name, tensor in self._weights.items():
            yield whole_piece(name, tensor)

    def weight_dtype(self, name: str) -> torch.dtype:
        return self._weights[name].dtype

    def sleep(self) -> None:
        with self._loop.exclusive("sleep"):
            self._ready = False

    def wake_up(self, *, weights_only: bool = False) -> None:
        return

    def shutdown(self) -> None:
        self._loop.close()
        self._model, self._weights, self._ready = None, {}, False


def _named_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Names the parameters; a tied weight is listed once, at the input embedding."""
    return dict(unfused_tensors((name, param.detach()) for name, param in model.named_parameters()))


def _refuse_short_windows(config: PreTrainedConfig, max_model_len: int) -> None:
    """This engine masks padding only, so a sliding window shorter than the context would be ignored silently."""
    text = config.get_text_config()
    values = text.to_dict()
    kinds = set(values.get("layer_types") or ["full_attention"])
    window = values.get("sliding_window")
    if kinds == {"full_attention"} or (kinds <= {"full_attention", "sliding_attention"} and (window or 0) >= max_model_len):
        return
    raise EngineError(
        f"the hf rollout engine does full attention only; {text.model_type} has layers of kinds {sorted(kinds)} with a window "
        f"of {window} tokens and max_model_len is {max_model_len}; use rollout.name=vllm"
    )
