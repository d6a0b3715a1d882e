"""The hf rollout engine against Hugging Face generate and a plain cached sampling loop: CPU seconds, one thread.

    python scripts/bench/rollout_hf.py [--hidden 128] [--layers 4] [--prompts 32] [--samples 8] [--repeats 3]

All three sample at temperature 1 from the same left-padded prompts; rlhub and the loop also return log-probabilities.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.engines.rollout.base import GenerationRequest, RolloutEngine, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine

VOCABULARY = 64
STOP = 2


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def generate(model: Qwen2ForCausalLM, rows: list[list[int]], num_tokens: int, stop: int | None) -> None:
    ids, mask = padded(rows)
    options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "pad_token_id": 0, "eos_token_id": stop}
    model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, **options)


@torch.inference_mode()
def plain_loop(model: Qwen2ForCausalLM, rows: list[list[int]], num_tokens: int, stop: int | None) -> None:
    ids, mask = padded(rows)
    positions, cache = (mask.cumsum(1) - 1).clamp(min=0), None
    finished = torch.zeros(len(rows), dtype=torch.bool)
    for _ in range(num_tokens):
        out = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        log_probs = out.logits[:, -1].log_softmax(-1)
        ids = torch.multinomial(log_probs.exp(), 1)
        log_probs.gather(1, ids)
        finished |= ids[:, 0] == stop if stop is not None else False
        if finished.all():
            break
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        positions = positions[:, -1:] + 1


def cpu_seconds(action: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return min(times)


def build(arguments: argparse.Namespace) -> tuple[Qwen2ForCausalLM, RolloutEngine]:
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
                config=RolloutConfig(name="hf"),
                model=ModelConfig(path=folder),
                device=torch.device("cpu"),
                seed=0,
                max_prompt_length=64,
                max_response_length=64,
            )
        )
        engine.initialize()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    engine.update_weights([list(model.named_parameters())], 0)
    return model, engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 128), ("layers", 4), ("prompts", 32), ("samples", 8), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, engine = build(arguments)
    draw = random.Random(0)
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(draw.randint(8, 24))] for _ in range(arguments.prompts)]
    rows = [prompt for prompt in prompts for _ in range(arguments.samples)]
    requests = [GenerationRequest(prompt_ids=row, seed=seed) for seed, row in enumerate(rows)]
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {len(rows)} rows")
    print(f"{'tokens':>6}{'stops':>7}{'rlhub s':>9}{'generate s':>12}{'loop s':>8}{'of generate':>13}{'of loop':>9}")
    for num_tokens, stop in ((16, None), (64, None), (64, STOP)):
        params = SamplingParams(max_new_tokens=num_tokens, stop_token_ids=(STOP,), ignore_eos=stop is None)
        seconds = [
            cpu_seconds(action, arguments.repeats)
            for action in (
                lambda params=params: engine.generate(requests, params),
                lambda n=num_tokens, stop=stop: generate(model, rows, n, stop),
                lambda n=num_tokens, stop=stop: plain_loop(model, rows, n, stop),
            )
        ]
        ours, hugging_face, loop = seconds
        print(
            f"{num_tokens:6}{'no' if stop is None else 'yes':>7}{ours:9.2f}{hugging_face:12.2f}{loop:8.2f}"
            f"{ours / hugging_face:13.2f}{ours / loop:9.2f}"
        )


if __name__ == "__main__":
    main()
