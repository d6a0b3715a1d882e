"""Sections E and H: how fast the rollout engine is against bare vLLM, and how far its log-probs are from the trainer's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rlhub.algorithms.mismatch import measure_mismatch
from rlhub.algorithms.statistics import Gather
from rlhub.engines.rollout.base import Completion, GenerationRequest, RolloutEngine, WeightBucket, resolve_dtype
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.vllm.environment import guarded_process
from rlhub.engines.training.base import TrainEngine
from rlhub.engines.training.collectives import check_finite
from rlhub.errors import NonFiniteError, WeightMismatchError
from rlhub.protocol.weights.pieces import FP8, RELATIVE_ERROR, STEP_BELOW, dequantize, scales_name
from rlhub.sharding_manager.manager import ShardingManager
from scripts.gpu.baselines import bare_generate
from scripts.gpu.engines import (
    BUCKET_BYTES,
    columns_of,
    full_length,
    generation_requests,
    need_vllm,
    rollout_engine,
    rollout_setup,
    train_engine,
)
from scripts.gpu.measure import GIB, Context, apart, seconds_of
from scripts.gpu.models import model_folder, prompt_ids, shape
from scripts.gpu.rows import NotThere

MODEL = "1.5B"
AGAINST_VLLM = 0.95
MOST_DIFFERENCE, LEAST_ESS = 0.03, 0.99
"""Nats between sampler and trainer, of which bfloat16 explains about 0.01, and the effective sample size of pi / mu."""
LEAST_SURPRISE = 0.5
"""Nats of a sampled token on average: where the model is certain of all, no difference could show."""
SIGN = 0x80  # the highest bit of a number of eight bits
POISON = 100.0
"""Factor of a poisoned weight: no rounding explains it."""


def sizes(context: Context) -> tuple[int, int, int]:
    """Returns the number of requests, and the tokens of a prompt and of a response."""
    return (16, 16, 32) if context.small else (1024, 256, 512)


def prompts_of(context: Context, name: str, count: int, num_tokens: int) -> list[list[int]]:
    """Returns random prompts of the model's vocabulary."""
    return prompt_ids(count, num_tokens, int(shape(name, small=context.small)["vocab_size"]))  # type: ignore[call-overload]


# --- E -----------------------------------------------------------------------------------------------------------------------


def throughput(context: Context) -> None:
    """Compares whole batches through the rollout engine with LLM.generate, at equal settings."""
    rate: float | None = None
    with context.rows.trying("rollout"):
        need_vllm()
        folder = model_folder(context, MODEL)
        count, prompt, response = sizes(context)
        rate = apart(our_rate, context, folder, limit_s=context.left_s)
        what = f"{MODEL}: {count} requests of {prompt} + {response} tokens"
        same, plain = apart(bare_rates, context, folder, limit_s=context.left_s)
        settings = "LLM.generate, equal settings"
        context.rows.compare(f"{what}, against {settings}", rate, "tokens/s", baseline=same, at_least=AGAINST_VLLM)
        note = "baseline: without seeds and log-probs of each request"
        context.rows.measured(f"{what}, against {settings}, plain sampling", rate, "tokens/s", baseline=plain, note=note)
    with context.rows.trying("rollout with FP8 weights"):
        if context.on_gpu:
            need_vllm()
        apart(quantized, context, model_folder(context, MODEL), rate if context.on_gpu else None, limit_s=context.left_s)


def our_rate(context: Context, folder: Path) -> float:
    """Returns the tokens a second of the rollout engine, built as a run does with its defaults."""
    engine = rollout_engine(replace(_setup(context, folder), load_checkpoint=True))
    return _rate(context, engine)


def _rate(context: Context, engine: RolloutEngine) -> float:
    count, prompt, response = sizes(context)
    requests, params = generation_requests(prompts_of(context, MODEL, count, prompt)), full_length(response)
    engine.generate(requests[: count // 8], params)
    seconds = seconds_of(lambda: engine.generate(requests, params), context.device)
    engine.shutdown()
    return count * response / seconds


def quantized(context: Context, folder: Path, rate: float | None) -> None:
    """Measures an engine with projections in eight bits, vLLM on a GPU and hf on CPU, and checks what it holds after a second
    sync.  rate: tokens a second of the same engine with its default dtype."""
    count, prompt, response = sizes(context)
    name, count = "vllm" if context.on_gpu else "hf", count // 8
    train = train_engine(folder, context.device, max_tokens=16384, train=False)
    setup = rollout_setup(folder, context.device, prompt=prompt, response=response, name=name, quantization="fp8")
    rollout = rollout_engine(setup)
    manager = ShardingManager(train, rollout, bucket_bytes=BUCKET_BYTES)
    for version in range(2):
        report = manager.sync(version)
    trained = {name: weight for bucket in train.published_weights(bucket_bytes=BUCKET_BYTES) for name, weight in bucket}
    prompts = prompts_of(context, MODEL, count, prompt)
    found = _mismatch(train, prompts, rollout.generate(generation_requests(prompts), full_length(response)))
    what = f"{MODEL}: FP8 weights in {name}, log-probs of sampler and trainer"
    context.rows.measured(what, found["mismatch/abs_diff"], "nats", note=f"ess {found['mismatch/ess']:.3f}")
    what = f"{MODEL}: FP8 weights in {name}, largest error by the bound of 3 bits of mantissa"
    context.rows.check(what, _excess(rollout, trained), at_most=1.001)
    victim = next(piece.tensor for piece in rollout.live_weights() if piece.tensor.dtype == FP8)
    victim.view(torch.uint8).bitwise_xor_(SIGN)
    context.rows.check(f"{MODEL}: control: the same with the signs of one weight changed", _excess(rollout, trained), at_least=2)
    victim.view(torch.uint8).bitwise_xor_(SIGN)
    plain_bytes = sum(weight.numel() for weight in trained.values()) * resolve_dtype("auto", context.device).itemsize
    context.rows.measured(f"{MODEL}: bytes of FP8 weights in {name}", report.bytes / GIB, "GiB", baseline=plain_bytes / GIB)
    against = "" if rate is None else ", against the default dtype"
    context.rows.measured(f"{MODEL}: FP8 weights in {name}{against}", _rate(context, rollout), "tokens/s", baseline=rate)


def _excess(rollout: RolloutEngine, trained: dict[str, Tensor]) -> float:
    """Returns the largest difference between an element of the matrices that the engine's quantized weights stand for and the
    trainer's, as a share of the bound of rounding to e4m3."""
    live, worst = {piece.name: piece.tensor for piece in rollout.live_weights()}, 0.0
    for name in (name for name in trained if live[name].dtype == FP8):
        scales, weight = live[scales_name(name)], trained[name].float().to(live[name].device)
        steps = dequantize(torch.ones_like(weight).to(FP8), scales, torch.float32)
        bound = torch.maximum(RELATIVE_ERROR * weight.abs(), STEP_BELOW * steps)
        error = (dequantize(live[name], scales, torch.float32) - weight).abs() / bound
        worst = max(worst, float(error.nan_to_num(nan=torch.inf).max()))
    return worst


def _setup(context: Context, folder: Path) -> RolloutSetup:
    _, prompt, response = sizes(context)
    return rollout_setup(folder, context.device, prompt=prompt, response=response)


def bare_rates(context: Context, folder: Path) -> tuple[float, float]:
    """Returns the tokens a second of LLM.generate, with our sampling parameters and with plain ones."""
    setup = _setup(context, folder)
    count, prompt, response = sizes(context)
    with guarded_process({}):
        from vllm import LLM, SamplingParams

        from rlhub.engines.rollout.vllm.conversion import vllm_params
        from rlhub.engines.rollout.vllm.entrypoints import engine_arguments

        arguments = engine_arguments(setup, resolve_dtype("auto", context.device)) | {"load_format": "auto"}
        llm = LLM(**arguments)
    prompts = prompts_of(context, MODEL, count, prompt)
    same = [vllm_params(request, full_length(response)) for request in generation_requests(prompts)]
    plain = [SamplingParams(temperature=1.0, max_tokens=response, ignore_eos=True, detokenize=False)] * count
    rates = []
    for params in (same, plain):
        bare_generate(llm, prompts[: count // 8], params[: count // 8])
        llm.reset_prefix_cache()
        responses, seconds = bare_generate(llm, prompts, params)
        rates.append(sum(map(len, responses)) / seconds)
    return rates[0], rates[1]


# --- H -----------------------------------------------------------------------------------------------------------------------


def mismatch(context: Context) -> None:
    """Measures the mismatch with CUDA graphs and without, and poisons weights to see that the checks name them."""
    for eager in (False, True):
        kind = "eager" if eager or not context.on_gpu else "CUDA graphs"
        with context.rows.trying(f"{MODEL}: mismatch, {kind}"):
            need_vllm()
            if eager and not context.on_gpu:
                raise NotThere("on a CPU vLLM has no CUDA graphs, so the row above is eager")
            apart(sampled_and_trained, context, model_folder(context, MODEL), kind, eager, limit_s=context.left_s)


def sampled_and_trained(context: Context, folder: Path, kind: str, eager: bool) -> None:
    """Measures one pair of engines, and poisons weights of the first pair of a run."""
    count, prompt, response = (8, 16, 16) if context.small else (128, 128, 256)
    train = train_engine(folder, context.device, max_tokens=16384, train=False)
    setup = rollout_setup(folder, context.device, prompt=prompt, response=response, enforce_eager=eager)
    rollout = rollout_engine(setup)
    manager = ShardingManager(train, rollout, bucket_bytes=BUCKET_BYTES)
    prompts = prompts_of(context, MODEL, count, prompt)
    requests = generation_requests(prompts)
    for version in range(2):  # the second sync goes another way than the first: straight into the live weights
        manager.sync(version)
        found = _mismatch(train, prompts, rollout.generate(requests, full_length(response)))
        when = f"{MODEL}: {kind}, after the {'first' if version == 0 else 'second'} sync"
        difference, ess = found["mismatch/abs_diff"], found["mismatch/ess"]
        context.rows.check(f"{when}, log-probs of sampler and trainer", difference, "nats", at_most=MOST_DIFFERENCE)
        context.rows.check(f"{when}, effective sample size", ess, at_least=LEAST_ESS)
        surprise = math.log(found["mismatch/trainer_ppl"])
        context.rows.check(f"{when}, mean of -log p", surprise, "nats", at_least=LEAST_SURPRISE)
    if not eager:
        poison(context, train, rollout, prompts, requests, response)
    rollout.shutdown()


def _mismatch(train: TrainEngine, prompts: list[list[int]], completions: list[Completion]) -> dict[str, float]:
    """Returns mismatch/* as a run logs it."""
    columns = columns_of(prompts, completions)
    columns["old_log_probs"] = train.infer(columns, outputs=("log_probs",))["log_probs"]
    return measure_mismatch(columns, Gather.of(torch.arange(len(prompts)), None))


def poison(
    context: Context,
    train: TrainEngine,
    rollout: RolloutEngine,
    prompts: list[list[int]],
    requests: Sequence[GenerationRequest],
    response: int,
) -> None:
    """Spoils one weight at each of three places and writes whether the check there notices and names it."""
    names = [piece.name for piece in rollout.live_weights()]
    victim = names[len(names) // 2]
    found = named_by_sync(train, rollout, victim)
    context.rows.check("a weight poisoned on its way is named by the sync", float(found == victim), at_least=1, note=found)
    ShardingManager(train, rollout, bucket_bytes=BUCKET_BYTES).sync(3)
    with torch.no_grad():
        next(rollout.live_weights()).tensor.mul_(POISON)
    found_difference = _mismatch(train, prompts, rollout.generate(requests, full_length(response)))["mismatch/abs_diff"]
    what = "control: log-probs after a live weight is spoiled"
    context.rows.check(what, found_difference, "nats", at_least=10 * MOST_DIFFERENCE)
    found = named_as_infinite(train, victim)
    context.rows.check("a weight of the trainer that is not finite is named", float(found == victim), at_least=1, note=found)


def named_by_sync(train: TrainEngine, rollout: RolloutEngine, victim: str) -> str:
    """Returns the weight that a sync's error names when `victim` changes after its fingerprint was taken; "" without an error."""

    def poisoned(buckets: Iterable[WeightBucket]) -> Iterator[WeightBucket]:
        for bucket in buckets:
            yield [(name, tensor * POISON if name == victim else tensor) for name, tensor in bucket]

    load = rollout.update_weights
    rollout.update_weights = lambda buckets, version: load(poisoned(buckets), version)  # type: ignore[method-assign]
    try:
        ShardingManager(train, rollout, bucket_bytes=BUCKET_BYTES).sync(2)
    except WeightMismatchError as error:
        return str(error.weight)
    finally:
        rollout.update_weights = load  # type: ignore[method-assign]
    return ""


def named_as_infinite(train: TrainEngine, victim: str) -> str:
    """Returns the weight that the check before each sync names when one element of `victim` is NaN; "" without an error."""
    piece = next(piece for piece in train.local_weights() or () if piece.name == victim)
    with torch.no_grad():
        piece.tensor.view(-1)[0] = torch.nan
    try:
        check_finite(train, "before the sync")
    except NonFiniteError as error:
        return ", ".join(error.weights)
    return ""
