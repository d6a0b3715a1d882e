"""vLLM as rlhub drives it: an LLM in this process, or an AsyncLLMEngine over processes of vLLM's.

    InProcessLLM        runs in the trainer's or a replica's own process, on whole batches or step by step
    AsyncClient         runs the engine core in a child process, with one worker process per rank under tensor parallelism
    engine_arguments    the arguments that both are built with

This module imports vLLM, so `environment` must have prepared the process.  vLLM's engine core imports the module too, to find
the class of its executor; from then on it watches its owner and ends with it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from vllm import LLM, AsyncEngineArgs, AsyncLLMEngine, CompletionOutput, RequestOutput, TokensPrompt
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from rlhub.engines.rollout.base import Completion, GenerationRequest, Progress, SamplingParams, WeightBucket
from rlhub.engines.rollout.continuous_batching import TokenEvent
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.vllm import internals
from rlhub.engines.rollout.vllm.conversion import ADAPTER, finish_reason_of, progress_of, vllm_params
from rlhub.engines.rollout.vllm.environment import agree_on_stream, agree_on_threads, end_with_owner, job_identity, own_stream
from rlhub.engines.rollout.vllm.internals import MultiprocExecutor, UniProcExecutor, cpu_head_widths
from rlhub.engines.rollout.vllm.worker import StandbyWeights, add_adapter, live_weights, load_stream
from rlhub.errors import EngineError
from rlhub.models.shape import NUM_EXPERTS, expert_layers
from rlhub.protocol.weights.pieces import BLOCK, Piece

EXTENSION = "rlhub.engines.rollout.vllm.worker.WorkerExtension"
SHUTDOWN_S = 30.0  # long, because a process that must be killed leaves its shared memory behind
CPU_BLOCK_TOKENS = 32  # vLLM's CPU attention wants multiples of 32; small blocks let short prompts share a prefix
MIN_CACHE_BYTES = 16 << 20
MAX_CACHE_BYTES = 4 << 30
FREE_MEMORY_DIVISOR = 8  # the cache takes at most 1/8 of the free memory, because several ranks start on one machine
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 512)  # of vLLM's max_lora_rank
FP8_OVERRIDES = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
}
"""The entries of config.json by which vLLM builds the layers of a checkpoint as DeepSeek-V3's."""
OnTokens = Callable[[Progress], None]
"""A callback for the next tokens of one request, without their versions."""


class InProcessLLM:
    """Runs whole batches through vLLM's own `generate`, or single requests as a `Stepper`, but not both at one time."""

    def __init__(self, setup: RolloutSetup, dtype: torch.dtype, *, in_process_group: bool) -> None:
        """Builds the engine.

        in_process_group: True if torch.distributed is initialized, so that this job's ranks form the tensor-parallel groups;
        False lets vLLM create a group of its own for this one process.
        """
        self.can_sleep = setup.config.free_cache_engine and bool(current_platform.is_sleep_mode_available())
        arguments = {
            **engine_arguments(setup, dtype),
            "enable_sleep_mode": self.can_sleep,
            "async_scheduling": False if setup.config.mode == "async" else None,  # otherwise a step would always be computing
        }
        if in_process_group:
            arguments["distributed_executor_backend"] = "external_launcher"
        internals.keep_weights_unpacked()
        with internals.named_shared_memory(job_identity()):
            self.llm = LLM(**arguments)
        if in_process_group:
            internals.spare_process_group(self.llm)
        if setup.config.quantization:
            internals.check_fp8_kernels(self.model)
        self._in_process_group = in_process_group
        self._devices = [setup.device] if setup.device.type == "cuda" else []
        self._stream = own_stream(setup.device)
        self.adapter = ADAPTER if setup.adapters else None
        self._failure: BaseException | None = None
        self._salts = itertools.count()
        self.expert_layers = expert_layers(_text_config(setup).to_dict()) if setup.routed_experts else []
        self.standby = StandbyWeights(self.model)
        self.weights_changed()

    @property
    def model(self) -> nn.Module:
        """Returns this rank's live part of the model."""
        found: nn.Module = self.llm.apply_model(_itself)[0]
        return found

    @property
    def vocab_size(self) -> int:
        """Returns the number of token ids that the model reads."""
        return int(self.llm.model_config.get_vocab_size())

    @property
    def failure(self) -> str:
        """Returns the error of the step after which the engine accepts no request, or "" if no step has failed."""
        return "" if self._failure is None else f"{type(self._failure).__name__}: {self._failure}"

    @property
    def _concurrent_steps(self) -> int:
        """Returns how many steps vLLM schedules before the first of them has ended."""
        return int(self.llm.llm_engine.vllm_config.max_concurrent_batches)

    def load_stream(self, buckets: Iterable[WeightBucket], expected: Mapping[str, torch.dtype]) -> None:
        """Writes a whole stream of full tensors; each rank takes its own part of them."""
        load_stream(self.model, buckets, expected)

    def add_adapter(self, rank: int, targets: str | list[str]) -> None:
        """Adds a LoRA adapter of zeros, which alone is `live_weights` from then on."""
        add_adapter(self.model, rank, targets)

    def live_weights(self) -> Iterator[Piece]:
        """Yields this rank's parameters as views under Hugging Face names."""
        return live_weights(self.model)

    def weights_changed(self) -> None:
        """Changes the cache salt, so that no later request finds cached prefixes of the old weights.  Running requests keep
        their blocks."""
        self._salt = f"weights-{next(self._salts)}"

    # -- whole batches -----------------------------------------------------------------------------------------------------

    def prompt(self, request: GenerationRequest) -> TokensPrompt:
        """Returns the request's prompt, salted for the present weights."""
        return TokensPrompt(prompt_token_ids=list(request.prompt_ids), cache_salt=self._salt)

    @contextmanager
    def whole_batch(self) -> Iterator[LLM]:
        """Yields the LLM for one call of `generate`, in any thread.

        Afterwards no part of the requests is left in the engine, even after an error.  If a step failed, the engine accepts no
        more.
        """
        self._refuse_failed()
        agree_on_threads()
        agree_on_stream(self._stream)
        with torch.random.fork_rng(devices=self._devices):  # vLLM draws from the global generators too
            try:
                yield self.llm
            except BaseException as error:
                if self.llm.llm_engine.has_unfinished_requests():
                    self._failure = error  # the scheduler counts their step as computed, and has cached it
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
        """Raises EngineError if vLLM is configured so that single requests could not be interrupted between two steps."""
        if self._concurrent_steps > 1:
            raise EngineError(
                "vLLM schedules a step ahead of the one that runs, so single requests could not be interrupted between two: "
                "set rollout.mode=async"
            )

    def add(self, key: int, request: GenerationRequest, params: SamplingParams) -> None:
        self._refuse_failed()
        prompt = tokens_input(list(request.prompt_ids), cache_salt=self._salt)  # equal to `prompt`, without the renderer's work
        self.llm.llm_engine.add_request(str(key), prompt, vllm_params(request, params, stream=True), lora_request=self.adapter)

    def step(self) -> Sequence[TokenEvent]:
        agree_on_threads()
        agree_on_stream(self._stream)
        events: list[TokenEvent] = []
        for output in self._step():
            events += _events(int(output.request_id), progress_of(output))
        return events

    def remove(self, keys: Collection[int]) -> None:
        self.llm.llm_engine.abort_request([str(key) for key in keys])

    def recompute(self) -> None:
        """Moves all running requests back to the waiting ones, which have no keys and values."""
        if not self.llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM did not give up the keys and values of the running requests")

    def shut_down(self) -> None:
        """Releases the engine and leaves the job's process group intact."""
        internals.shut_down(self.llm, keep_process_group=self._in_process_group)


def _events(key: int, part: Progress) -> Iterator[TokenEvent]:
    last, tops = len(part.token_ids) - 1, part.top_log_probs or itertools.repeat(None)
    for i, (token, log_prob, top) in enumerate(zip(part.token_ids, part.log_probs, tops, strict=False)):
        yield TokenEvent(
            key, token, log_prob, part.finish_reason if i == last else None, top, None if i else part.prompt_log_probs
        )


def _itself(model: nn.Module) -> nn.Module:
    return model


class AsyncClient:
    """Drives vLLM's AsyncLLMEngine from one event loop, on which all its methods are called.

    The constructor blocks the loop while vLLM's processes start.
    """

    def __init__(self, setup: RolloutSetup, dtype: torch.dtype) -> None:
        parallel = setup.config.tensor_model_parallel_size > 1
        arguments = AsyncEngineArgs(
            **engine_arguments(setup, dtype),
            # Set explicitly: inside a Ray actor vLLM would start its workers as Ray actors too.
            distributed_executor_backend="mp" if parallel else "uni",
            worker_extension_cls=EXTENSION,
        )
        self._llm = AsyncLLMEngine(
            vllm_config=arguments.create_engine_config(UsageContext.LLM_CLASS),
            executor_class=WorkersExecutor if parallel else CoreExecutor,
            log_stats=False,
            log_requests=False,
        )
        self._versions = internals.token_versions(self._llm)
        self._adapter = ADAPTER if setup.adapters else None
        self._entry = asyncio.Lock()  # held while a request travels to the core, so that none does during a pause

    async def generate(
        self, key: str, request: GenerationRequest, params: SamplingParams, salt: str, on_tokens: OnTokens | None
    ) -> Completion:
        """Generates one completion; cancelling the task ends the request.

        salt: requests share cached prefixes only with requests of the same salt.
        """
        sampling = vllm_params(request, params, stream=on_tokens is not None)
        prompt = tokens_input(list(request.prompt_ids), cache_salt=salt)
        try:
            async with self._entry:
                queue = await self._llm.add_request(key, prompt, sampling, lora_request=self._adapter)
            answer = _Answer(params, on_tokens)
            while not answer.add(queue.get_nowait() or await queue.get()):
                pass
            return answer.completion(self._versions.of(queue, answer.last))
        except (asyncio.CancelledError, EngineError):
            await self._llm.abort(key)
            raise

    async def abort(self, keys: list[str]) -> None:
        """Ends these requests; their completions contain the tokens so far.  Unknown keys are ignored."""
        await self._llm.abort(keys)

    async def pause(self) -> None:
        """Stops the engine between two steps and returns when no step is computing.  Requests keep their tokens."""
        async with self._entry:
            await internals.pause(self._llm)

    async def resume(self, *, recompute: bool) -> None:
        """Continues stepping.  recompute: first discards the keys and values of all requests."""
        if recompute and not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM did not give up the keys and values of the running requests")
        await self._llm.resume_generation()

    async def set_version(self, version: int) -> None:
        """Marks the tokens of later steps with this version."""
        await self._versions.change(version)

    async def call_workers(self, target: str, method: str, arguments: bytes) -> list[bytes]:
        """Calls WorkerExtension.rlhub_call between two steps; returns one reply per worker."""
        replies: list[bytes] = await self._llm.collective_rpc("rlhub_call", args=(target, method, arguments))
        return replies

    @property
    def vocab_size(self) -> int:
        """Returns the number of token ids that the model reads."""
        return int(self._llm.model_config.get_vocab_size())

    @property
    def dead(self) -> bool:
        """Returns whether one of vLLM's processes has ended."""
        return bool(self._llm.errored)

    def close(self) -> None:
        """Ends the processes; blocks until they have ended."""
        self._llm.shutdown(timeout=SHUTDOWN_S)


class _Answer:
    """Collects the outputs of one request, whose tokens arrive step by step or all at the end."""

    def __init__(self, params: SamplingParams, on_tokens: OnTokens | None) -> None:
        self._params, self._on_tokens = params, on_tokens
        self._written = Completion(token_ids=[], log_probs=[], finish_reason="abort")
        self.last: CompletionOutput | None = None

    def add(self, output: RequestOutput) -> bool:
        """Adds an output; returns whether it is the last."""
        self.last, part = output.outputs[0], progress_of(output, self._params)
        self._written.extend(part)
        if self._on_tokens is not None and part.token_ids:
            self._on_tokens(part)
        return bool(output.finished)

    def completion(self, versions: list[int]) -> Completion:
        """Returns the completion, given the version of each token.  Call after the last output."""
        assert self.last is not None
        if len(versions) != len(self._written.token_ids):
            raise EngineError(f"vLLM returned {len(versions)} versions for {len(self._written.token_ids)} tokens")
        return replace(self._written, versions=versions, finish_reason=finish_reason_of(self.last))


class CoreExecutor(UniProcExecutor):  # type: ignore[misc]  # vLLM's types are not read
    """Runs the model inside the engine core."""


class WorkersExecutor(MultiprocExecutor):  # type: ignore[misc]
    """Runs the model's tensor-parallel parts in worker processes."""


def engine_arguments(setup: RolloutSetup, dtype: torch.dtype) -> dict[str, Any]:
    """Returns vLLM's arguments for a model.  Raises EngineError for a model that vLLM cannot run on this platform."""
    arguments = _arguments(setup, dtype)
    if current_platform.is_cpu():
        text = _text_config(setup)
        _check_head_width(text)
        arguments.update(
            enforce_eager=True,  # compiling takes a minute and a half here and gains 9 %
            enable_expert_parallel=False,  # the kernel of experts there computes with all of them
            block_size=CPU_BLOCK_TOKENS,
            # After a part of a prompt vLLM sets the seeded generator back, which CPU generators cannot do.
            enable_chunked_prefill=False,
            kv_cache_memory_bytes=_cpu_cache_bytes(setup, text, dtype),
        )
    return arguments


def _arguments(setup: RolloutSetup, dtype: torch.dtype) -> dict[str, Any]:
    config = setup.config
    return {
        "model": setup.model.path,
        "trust_remote_code": setup.model.trust_remote_code,
        "hf_overrides": {**setup.model.override_config, **(FP8_OVERRIDES if config.quantization == "fp8" else {})},
        "quantization": config.quantization,
        "load_format": "auto" if setup.reads_files else "dummy",
        "dtype": str(dtype).removeprefix("torch."),
        "seed": setup.seed + setup.dp_rank,  # ranks of one tensor-parallel group must agree, replicas must not
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "enable_expert_parallel": config.enable_expert_parallel,
        "max_model_len": setup.max_model_len,
        **setup.step_limits(),
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager,
        "logprobs_mode": "processed_logprobs",  # those of the sampled distribution, which the trainer compares with its own
        "skip_tokenizer_init": not setup.structured,  # token in, token out; only grammars need the texts of tokens
        "moe_backend": "auto" if current_platform.is_cpu() else "triton",  # others shuffle the experts' weights when they load
        "generation_config": "vllm",  # the model folder's sampling defaults must not change the requests
        **(_lora_arguments(setup) if setup.adapters else {}),
        **({"enable_return_routed_experts": True} if setup.routed_experts else {}),
    }


def _lora_arguments(setup: RolloutSetup) -> dict[str, Any]:
    """Returns the arguments of an engine with one adapter.  Raises EngineError for a rank beyond what vLLM's kernels have, and
    for a mixture of experts, which vLLM would give adapters that no update brings."""
    rank, remedy = setup.model.lora_rank, "set actor_rollout_ref.rollout.lora_sync=merged"
    values = _text_config(setup).to_dict()
    if any(values.get(name) for name in NUM_EXPERTS):
        raise EngineError(f"an adapter alone cannot be given to vLLM for the experts of {setup.model.path}: {remedy}")
    largest = next((size for size in ADAPTER_RANKS if size >= rank), None)
    if largest is None:
        raise EngineError(f"vLLM computes adapters of rank {ADAPTER_RANKS[-1]} at most, and model.lora_rank={rank}: {remedy}")
    return {"enable_lora": True, "max_lora_rank": largest, "max_loras": 1}


def _text_config(setup: RolloutSetup) -> PreTrainedConfig:
    """Returns the language model's part of the Hugging Face configuration, with the user's overrides."""
    return AutoConfig.from_pretrained(
        setup.model.path, trust_remote_code=setup.model.trust_remote_code, **setup.model.override_config
    ).get_text_config()


def _check_head_width(text: PreTrainedConfig) -> None:
    """Raises EngineError for a head width without a CPU kernel.  vLLM would fail in the first generation, without naming the
    setting."""
    width, known = _head_width(text), cpu_head_widths()
    if width not in known:
        raise EngineError(
            f"vLLM on CPU has attention for heads of {', '.join(map(str, known))} elements; the model's have {width}: "
            "use rollout.name=hf"
        )


def _cpu_cache_bytes(setup: RolloutSetup, text: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Returns the size of the key-value cache on CPU, where vLLM has no memory budget to fill.

    It holds `most_sequences` sequences of full length, within bounds, and at least two.  A cache that is smaller than the
    sequences need is still correct: vLLM then preempts and recomputes.
    """
    if setup.config.kv_cache_gb is not None:
        return int(setup.config.kv_cache_gb * (1 << 30))
    per_sequence = _bytes_per_token(setup, text, dtype) * CPU_BLOCK_TOKENS * (-(-setup.max_model_len // CPU_BLOCK_TOKENS) + 1)
    wanted = per_sequence * setup.config.most_sequences
    ceiling = min(MAX_CACHE_BYTES, int(psutil.virtual_memory().available) // FREE_MEMORY_DIVISOR)
    return max(min(wanted, ceiling), 2 * per_sequence, MIN_CACHE_BYTES)


def _bytes_per_token(setup: RolloutSetup, text: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Returns the bytes that one token's keys and values take, over all layers, on one tensor-parallel rank."""
    heads = text.to_dict().get("num_key_value_heads") or text.num_attention_heads
    local_heads = max(1, heads // setup.config.tensor_model_parallel_size)
    return int(2 * text.num_hidden_layers * local_heads * _head_width(text) * dtype.itemsize)


def _head_width(text: PreTrainedConfig) -> int:
    """Returns the number of elements of one attention head."""
    return int(text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads)


end_with_owner()
