"""Single requests in a continuous batch against whole batches, on one engine in one process: tokens a second.

    python scripts/bench/rollout_async.py [--engines hf vllm] [--requests 64] [--tokens 128] [--hidden 128] [--repeats 5]

`at once`: all requests are submitted together, as the batch is.  `steady`: three times as many, with a new one for each that
ends, and lengths that differ; the batch then is three batches.  The ratio is agenerate over generate; runs alternate and the
best of each counts, so that other work on the machine meets both.  Then, while requests run, `pause` is called 20 times, each
time the weights' version changes, and keys and values are computed anew: milliseconds until no step is under way.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.engines.rollout.base import Completion, GenerationRequest, RolloutEngine, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine

VOCABULARY = 64
STOP = 2
WAVES = 3
NUM_PAUSES = 20


def build(name: str, arguments: argparse.Namespace) -> RolloutEngine:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 32,
        num_key_value_heads=max(1, arguments.hidden // 64),
        tie_word_embeddings=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        engine = build_rollout_engine(
            RolloutSetup(
                config=RolloutConfig(name=name, max_num_seqs=max(256, arguments.requests)),
                model=ModelConfig(path=folder),
                device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
                seed=0,
                max_prompt_length=64,
                max_response_length=arguments.tokens,
            )
        )
        engine.initialize()
    torch.manual_seed(0)
    engine.update_weights([list(Qwen2ForCausalLM(config).named_parameters())], 0)
    return engine


def make_requests(count: int) -> list[GenerationRequest]:
    draw = random.Random(0)
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(draw.randint(8, 24))] for _ in range(count)]
    return [GenerationRequest(prompt_ids=prompt, seed=seed) for seed, prompt in enumerate(prompts)]


def at_once(engine: RolloutEngine, requests: list[GenerationRequest], params: SamplingParams, width: int) -> list[Completion]:
    """All in one continuous batch; at most `width` at a time."""

    async def run() -> list[Completion]:
        places = asyncio.Semaphore(width)

        async def one(request: GenerationRequest) -> Completion:
            async with places:
                return await engine.agenerate(request, params)

        return list(await asyncio.gather(*map(one, requests)))

    return asyncio.run(run())


def in_batches(engine: RolloutEngine, requests: list[GenerationRequest], params: SamplingParams, width: int) -> list[Completion]:
    batches = [requests[first : first + width] for first in range(0, len(requests), width)]
    return [completion for batch in batches for completion in engine.generate(batch, params)]


def rate(action: Callable[[], list[Completion]]) -> float:
    """Tokens a second of CPU time (a GPU: of wall time)."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    start = clock()
    tokens = sum(len(completion.token_ids) for completion in action())
    return tokens / (clock() - start)


def compare(engine: RolloutEngine, arguments: argparse.Namespace, *, steady: bool) -> tuple[float, float]:
    """Best tokens a second of generate and of agenerate."""
    count = arguments.requests * (WAVES if steady else 1)
    params = SamplingParams(max_new_tokens=arguments.tokens, stop_token_ids=(STOP,), ignore_eos=not steady)
    requests = make_requests(count)
    best = [0.0, 0.0]
    for _ in range(arguments.repeats):
        for i, way in enumerate((in_batches, at_once)):
            best[i] = max(best[i], rate(partial(way, engine, requests, params, arguments.requests)))
    return best[0], best[1]


async def pauses(engine: RolloutEngine, arguments: argparse.Namespace) -> list[float]:
    """Milliseconds of each pause, ascending."""
    params = SamplingParams(max_new_tokens=arguments.tokens, ignore_eos=True)
    tasks = [asyncio.create_task(engine.agenerate(request, params)) for request in make_requests(arguments.requests)]
    waits = []
    for _ in range(NUM_PAUSES):
        await asyncio.sleep(0.01)
        start = time.perf_counter()
        await asyncio.to_thread(engine.pause)
        waits.append(1e3 * (time.perf_counter() - start))
        with engine.overwriting(engine.version + 1):
            pass
        engine.resume()
    engine.abort()
    await asyncio.gather(*tasks)
    return sorted(waits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["hf", "vllm"])
    for name, default in (("requests", 64), ("tokens", 128), ("hidden", 128), ("layers", 4), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'engine':8}{'load':>10}{'generate tok/s':>17}{'agenerate tok/s':>18}{'ratio':>8}")
    for name in arguments.engines:
        engine = build(name, arguments)
        for steady in (False, True):
            batch, single = compare(engine, arguments, steady=steady)
            print(f"{name:8}{'steady' if steady else 'at once':>10}{batch:17.0f}{single:18.0f}{single / batch:8.2f}", flush=True)
        waits = asyncio.run(pauses(engine, arguments))
        print(f"{name:8}{'pause':>10} p50 {waits[len(waits) // 2]:.1f} ms, longest {waits[-1]:.1f} ms", flush=True)
        engine.shutdown()


if __name__ == "__main__":
    main()
