"""vLLM's LLM in this process, beside a trainer: built, fed with whole batches or step by step, shut down.

Imports vLLM: see `environment` for what must come first.

§§ client: vLLM's AsyncLLMEngine: an engine core in a child process, and with tensor parallelism a worker process a rank below it.

Imports vLLM: see `environment`.  All methods run on one event loop.  The engine core imports this module to know its executor's
class, and watches its owner from then on.

§§ arguments: vLLM's engine arguments, in this process or in processes of its own.  Imports vLLM: see `environment`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from vllm import LLM, AsyncEngineArgs, AsyncLLMEngine, CompletionOutput, RequestOutput, TokensPrompt
from vllm.inputs import tokens_input
from vllm.platforms import current_platform

from rlhub.engines.rollout.base import Completion, FinishReason, GenerationRequest, SamplingParams, WeightBucket
from rlhub.engines.rollout.continuous_batching import TokenEvent
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.vllm import internals
from rlhub.engines.rollout.vllm.conversion import finish_reason_of, log_probs_of, vllm_params
from rlhub.engines.rollout.vllm.environment import agree_on_stream, agree_on_threads, end_with_owner, job_identity, own_stream
from rlhub.engines.rollout.vllm.internals import MultiprocExecutor, UniProcExecutor, cpu_head_widths
from rlhub.engines.rollout.vllm.worker import live_weights, load_weights
from rlhub.errors import EngineError
from rlhub.protocol.weights.pieces import Piece

CPU_BLOCK_TOKENS = 32  # vLLM's CPU attention wants multiples of 32; small blocks let short prompts share a prefix
MIN_CACHE_BYTES = 16 << 20
MAX_CACHE_BYTES = 4 << 30
MEMORY_SHARE = 8  # at most 1/8 of the memory that is free: several ranks start on one machine


def engine_arguments(setup: RolloutSetup, dtype: torch.dtype) -> dict[str, Any]:
    """Returns vLLM's arguments for a model that this platform can run; raises EngineError for another."""
    arguments = _arguments(setup, dtype)
    if current_platform.is_cpu():
        text = _text_config(setup)
        _check_head_width(text)
        _refuse_experts(setup, text)
        arguments.update(
            enforce_eager=True,  # compiling takes a minute and a half here and gains 9 %
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
        "hf_overrides": dict(setup.model.override_config),
        "load_format": "auto" if setup.load_checkpoint else "dummy",
        "dtype": str(dtype).removeprefix("torch."),
        "seed": setup.seed + setup.dp_rank,  # ranks of one tensor-parallel group must agree, replicas must not
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "max_model_len": setup.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, setup.max_model_len, config.max_num_seqs),
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from: what the trainer compares with
        "skip_tokenizer_init": True,  # token in, token out
        "generation_config": "vllm",  # the model folder's sampling defaults must not change the requests
    }


def _text_config(setup: RolloutSetup) -> PreTrainedConfig:
    """The language model's part of the Hugging Face configuration, overrides applied."""
    return AutoConfig.from_pretrained(
        setup.model.path, trust_remote_code=setup.model.trust_remote_code, **setup.model.override_config
    ).get_text_config()


def _check_head_width(text: PreTrainedConfig) -> None:
    """vLLM itself fails only in the first generation, and without naming the model's setting."""
    width, known = _head_width(text), cpu_head_widths()
    if width not in known:
        raise EngineError(
            f"vLLM on CPU has attention for heads of {', '.join(map(str, known))} elements; the model's have {width}: "
            "use rollout.name=hf"
        )


def _refuse_experts(setup: RolloutSetup, text: PreTrainedConfig) -> None:
    """vLLM's CPU kernels take the experts' weights in a layout of their own, made once when the model is loaded."""
    values = text.to_dict()
    if values.get("num_experts") or values.get("num_local_experts"):
        raise EngineError(
            f"vLLM on CPU repacks the experts of {setup.model.path} when it loads them, so they could not be updated: "
            "use rollout.name=hf"
        )


def _cpu_cache_bytes(setup: RolloutSetup, text: PreTrainedConfig, dtype: torch.dtype) -> int:
    """The size of the key-value cache on CPU, where vLLM has no memory budget of its own to fill.

    It holds `max_num_seqs` sequences of full length, within bounds, and never less than two.  A smaller cache than the sequences
    need is correct: vLLM then preempts and recomputes.
    """
    if setup.config.kv_cache_gb is not None:
        return int(setup.config.kv_cache_gb * (1 << 30))
    per_sequence = _bytes_per_token(setup, text, dtype) * CPU_BLOCK_TOKENS * (-(-setup.max_model_len // CPU_BLOCK_TOKENS) + 1)
    wanted = per_sequence * setup.config.max_num_seqs
    ceiling = min(MAX_CACHE_BYTES, int(psutil.virtual_memory().available) // MEMORY_SHARE)
    return max(min(wanted, ceiling), 2 * per_sequence, MIN_CACHE_BYTES)


def _bytes_per_token(setup: RolloutSetup, text: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Keys and values of all layers on one tensor-parallel rank."""
    heads = text.to_dict().get("num_key_value_heads") or text.num_attention_heads
    local_heads = max(1, heads // setup.config.tensor_model_parallel_size)
    return int(2 * text.num_hidden_layers * local_heads * _head_width(text) * dtype.itemsize)


def _head_width(text: PreTrainedConfig) -> int:
    """Elements of one attention head."""
    return int(text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads)


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


EXTENSION = "rlhub.engines.rollout.vllm.worker.WorkerExtension"
SHUTDOWN_S = 30.0  # a process that is killed leaves its shared memory behind
OnTokens = Callable[[list[int], list[float], FinishReason | None], None]
"""Called with new tokens, their log-probs (none where they were not asked for) and, with the last ones, why they end."""


class CoreExecutor(UniProcExecutor):  # type: ignore[misc]  # vLLM's types are not read
    """The model is in the engine core."""


class WorkersExecutor(MultiprocExecutor):  # type: ignore[misc]
    """The model's parts are in worker processes."""


class AsyncClient:
    """See the module docstring.  Built on the loop, which it blocks while the processes start."""

    def __init__(self, setup: RolloutSetup, dtype: torch.dtype) -> None:
        parallel = setup.config.tensor_model_parallel_size > 1
        arguments = AsyncEngineArgs(
            **engine_arguments(setup, dtype),
            # Chosen here: in a Ray actor vLLM would start workers that are Ray actors too.
            distributed_executor_backend="mp" if parallel else "uni",
            worker_extension_cls=EXTENSION,
        )
        self._llm = AsyncLLMEngine(
            vllm_config=arguments.create_engine_config(),
            executor_class=WorkersExecutor if parallel else CoreExecutor,
            log_stats=False,
            log_requests=False,
        )
        self._entry = asyncio.Lock()  # no request is on its way to the core while it is paused

    async def generate(
        self, key: str, request: GenerationRequest, params: SamplingParams, salt: str, on_tokens: OnTokens | None
    ) -> Completion:
        """Generates one completion.  salt: requests with another share no cached prefix with this one.  Cancelling ends the
        request."""
        sampling = vllm_params(request, params, stream=on_tokens is not None)
        prompt = tokens_input(list(request.prompt_ids), cache_salt=salt)
        try:
            async with self._entry:
                queue = await self._llm.add_request(key, prompt, sampling)
            answer = _Answer(params, on_tokens)
            while not answer.add(queue.get_nowait() or await queue.get()):
                pass
            return answer.completion()
        except (asyncio.CancelledError, EngineError):
            await self._llm.abort(key)
            raise

    async def abort(self, keys: list[str]) -> None:
        """Ends these requests, whose completions have the tokens so far.  Unknown keys are passed over."""
        await self._llm.abort(keys)

    async def pause(self) -> None:
        """Stops between two steps; on return none is computing.  Requests keep their tokens."""
        async with self._entry:
            await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self, *, recompute: bool) -> None:
        """Steps again.  recompute: all requests lose their keys and values first."""
        if recompute and not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM did not give up the keys and values of the running requests")
        await self._llm.resume_generation()

    async def set_version(self, version: int) -> None:
        """Marks the tokens of later steps with this version."""
        await self._llm.update_weight_version(str(version))

    async def call_workers(self, target: str, method: str, arguments: bytes) -> list[bytes]:
        """Calls WorkerExtension.rlhub_call between two steps; returns one reply a worker."""
        replies: list[bytes] = await self._llm.collective_rpc("rlhub_call", args=(target, method, arguments))
        return replies

    @property
    def vocab_size(self) -> int:
        """The number of token ids that the model reads."""
        return int(self._llm.model_config.get_vocab_size())

    @property
    def dead(self) -> bool:
        """Whether one of its processes has ended."""
        return bool(self._llm.errored)

    def close(self) -> None:
        """Ends the processes; blocks until they have ended."""
        self._llm.shutdown(timeout=SHUTDOWN_S)


class _Answer:
    """What comes for one request: its tokens as they come, or all at the end."""

    def __init__(self, params: SamplingParams, on_tokens: OnTokens | None) -> None:
        self._params, self._on_tokens = params, on_tokens
        self._tokens: list[int] = []
        self._log_probs: list[float] = []
        self._last: CompletionOutput | None = None

    def add(self, output: RequestOutput) -> bool:
        """Takes an output; returns whether it was the last."""
        self._last = part = output.outputs[0]
        tokens, log_probs = list(part.token_ids), log_probs_of(part)
        log_probs = log_probs if self._params.log_probs else []
        self._tokens += tokens
        self._log_probs += log_probs
        if self._on_tokens is not None and tokens:
            self._on_tokens(tokens, log_probs, finish_reason_of(part) if output.finished else None)
        return bool(output.finished)

    def completion(self) -> Completion:
        """Returns the completion, once the last output was taken."""
        assert self._last is not None
        versions = [int(span.version) for span in self._last.weight_versions or () for _ in range(span.start, span.end)]
        if len(versions) != len(self._tokens):
            raise EngineError(f"vLLM returned {len(versions)} versions for {len(self._tokens)} tokens")
        reason = finish_reason_of(self._last)
        return Completion(token_ids=self._tokens, log_probs=self._log_probs, finish_reason=reason, versions=versions)


end_with_owner()
