"""How far a trainer's log-probs of a mixture of experts are from the rollout's, with the trainer's own routing and with the
rollout's replayed (actor.router_replay=rollout).

    python scripts/bench/routing_mismatch.py [--seeds 3] [--prompts 32] [--tokens 64] [--experts 16] [--top 4]

The two engines have the same weights and differ in rounding as real stacks do: one computes in bfloat16, the other in float32.
experts: tokens that the trainer's routers send to other experts than the rollout's in any layer, and single choices of a layer.
k3, largest: the estimate of the KL divergence and the largest difference of log-probs of the sampled tokens.  shuffled: the
control, replaying the experts of other tokens of the same row.  On CPU, one process; numbers are the mean, the largest difference
the largest of the seeds.  Exit status 1 where a bound does not hold: with replay k3 is at most half, with shuffled choices at
least ten times as large.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

from rlhub.models.megatron import compat  # noqa: F401 - before megatron, which it imports quietly

# isort: split
import torch
from megatron.core.transformer.moe.router import TopKRouter
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rlhub.algorithms.mismatch import mismatch_metrics, mismatch_sums
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import FSDPConfig, MegatronConfig, ModelConfig
from rlhub.engines.rollout.base import GenerationRequest, SamplingParams
from rlhub.engines.rollout.hf.engine import HFEngine
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.training.base import TrainEngine
from rlhub.engines.training.collectives import ensure_process_group
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.engines.training.megatron.engine import MegatronEngine
from rlhub.engines.training.packing import needed_tokens
from rlhub.models.experts import routers_of
from rlhub.protocol.columns import dense_rows, jagged
from rlhub.protocol.sequences import ROUTED_EXPERTS
from rlhub.workers.generation import experts_column, pad_completions, training_columns

CPU = torch.device("cpu")
VOCABULARY, PROMPT = 512, 24
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
PAIRS = (("bf16", "fp32"), ("fp32", "bf16"))
"""The dtypes of rollout and trainer."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one trainer made of the rollout's tokens.  tokens, choices: shares with other experts; k3, largest: by replay."""

    tokens: float
    choices: float
    k3: dict[str, float]
    largest: dict[str, float]


def build(folder: Path, seed: int, experts: int, top: int) -> None:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=top,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def generated(folder: Path, dtype: str, seed: int, prompts: int, tokens: int) -> dict[str, Tensor]:
    """Returns the training columns of one sample of each prompt, with its experts."""
    setup = RolloutSetup(
        config=RolloutConfig(name="hf", dtype=DTYPES[dtype]),  # type: ignore[arg-type]
        model=ModelConfig(path=str(folder)),
        device=CPU,
        seed=seed,
        max_prompt_length=PROMPT,
        max_response_length=tokens,
        load_checkpoint=True,
    )
    engine = HFEngine(setup)
    engine.initialize()
    ids = torch.randint(0, VOCABULARY, (prompts, PROMPT), generator=torch.Generator().manual_seed(seed))
    requests = [GenerationRequest(prompt_ids=row, seed=number) for number, row in enumerate(ids.tolist())]
    written = engine.generate(requests, SamplingParams(max_new_tokens=tokens, routed_experts=True))
    padded = pad_completions(written, pad_id=0, with_log_probs=True, widest=lambda width: width)
    return training_columns(ids, torch.ones_like(ids), padded, 1) | {ROUTED_EXPERTS: experts_column(requests, written)}


def trainer(name: str, folder: Path, dtype: str) -> TrainEngine:
    model = ModelConfig(path=str(folder))
    engine: TrainEngine
    if name == "fsdp2":
        engine = FSDPEngine(model, FSDPConfig(model_dtype=dtype), None, kind="policy", device=CPU)  # type: ignore[arg-type]
    else:
        engine = MegatronEngine(model, MegatronConfig(model_dtype=dtype), None, kind="policy", device=CPU)  # type: ignore[arg-type]
    engine.initialize()
    return engine


@contextmanager
def own_choices(engine: TrainEngine) -> Iterator[list[Tensor]]:
    """Yields a list that gets each router's choices in the passes inside the context: (tokens, experts) masks."""
    found: list[Tensor] = []

    def of_indices(router: object, inputs: object, output: tuple[Tensor, ...]) -> None:
        found.append(torch.zeros(output[0].shape, dtype=torch.bool).scatter(1, output[2], True))

    def of_map(router: object, inputs: object, output: tuple[Tensor, Tensor]) -> None:
        found.append(output[1])

    if isinstance(engine, FSDPEngine):
        handles = [router.register_forward_hook(of_indices) for router in routers_of(engine.model)]
    else:
        assert isinstance(engine, MegatronEngine)
        routers = [part for chunk in engine.chunks for part in chunk.modules() if isinstance(part, TopKRouter)]
        handles = [router.register_forward_hook(of_map) for router in routers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def shuffled(column: Tensor, seed: int) -> Tensor:
    """Returns the experts of each row's tokens in another order of the tokens."""
    values, lengths = dense_rows(column)
    generator = torch.Generator().manual_seed(seed)
    parts = [part[torch.randperm(len(part), generator=generator)] for part in torch.split(values, lengths.tolist())]
    return jagged(torch.cat(parts), lengths)


def compare(engine: TrainEngine, rows: dict[str, Tensor], seed: int) -> Outcome:
    plain = {name: column for name, column in rows.items() if name != ROUTED_EXPERTS}
    given = {"off": plain, "on": rows, "shuffled": rows | {ROUTED_EXPERTS: shuffled(rows[ROUTED_EXPERTS], seed)}}
    with own_choices(engine) as own:
        engine.infer(plain, outputs=("log_probs",))
    values, lengths = dense_rows(rows[ROUTED_EXPERTS])
    counts = needed_tokens(rows)[1].sum(1).tolist()
    read = torch.cat([part[:count] for part, count in zip(torch.split(values, lengths.tolist()), counts, strict=True)])
    recorded = read.long().view(len(read), len(own), -1)
    taken = torch.stack([mask.gather(1, recorded[:, layer]) for layer, mask in enumerate(own)], 1)
    others = (~taken).double()
    outcome = Outcome(tokens=float(others.flatten(1).amax(1).mean()), choices=float(others.mean()), k3={}, largest={})
    mask, sampled = rows["response_mask"], rows["rollout_log_probs"]
    for name, columns in given.items():
        log_probs = engine.infer(columns, outputs=("log_probs",))["log_probs"]
        sums = {key: float(value) for key, value in mismatch_sums(log_probs, sampled, mask).items()}
        outcome.k3[name] = mismatch_metrics(sums)["mismatch/k3"]
        outcome.largest[name] = float(((log_probs - sampled) * mask).abs().max())
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("seeds", 3), ("prompts", 32), ("tokens", 64), ("experts", 16), ("top", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    ensure_process_group(CPU, timeout_s=120)
    outcomes: dict[tuple[str, str, str], list[Outcome]] = {}
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            build(folder, seed, arguments.experts, arguments.top)
            for rollout, dtype in PAIRS:
                rows = generated(folder, rollout, seed, arguments.prompts, arguments.tokens)
                for backend in ("fsdp2", "megatron"):
                    outcome = compare(trainer(backend, folder, dtype), rows, seed)
                    outcomes.setdefault((rollout, backend, dtype), []).append(outcome)
    Console(width=150).print(table_of(outcomes))
    problems = [text for key, found in outcomes.items() for text in problems_of(key, found)]
    print("\n".join(problems))
    return int(bool(problems))


def mean(values: list[float]) -> float:
    return statistics.fmean(values)


def table_of(outcomes: dict[tuple[str, str, str], list[Outcome]]) -> Table:
    table = Table("rollout", "trainer", "other experts", "replay", "k3", "largest")
    for (rollout, backend, dtype), found in outcomes.items():
        other = f"{mean([one.tokens for one in found]):.1%} of tokens, {mean([one.choices for one in found]):.2%} of choices"
        for replay in ("off", "on", "shuffled"):
            k3, largest = mean([one.k3[replay] for one in found]), max(one.largest[replay] for one in found)
            table.add_row(rollout, f"{backend} {dtype}", other if replay == "off" else "", replay, f"{k3:.1e}", f"{largest:.2f}")
    return table


def problems_of(key: tuple[str, str, str], found: list[Outcome]) -> Iterator[str]:
    """Yields the bounds that do not hold."""
    name = " ".join(key)
    for seed, one in enumerate(found):
        if one.k3["on"] > 0.5 * one.k3["off"]:
            yield f"{name}, seed {seed}: k3 {one.k3['on']:.1e} with replay and {one.k3['off']:.1e} without (bound: half)"
        if one.k3["shuffled"] < 10 * one.k3["off"]:
            yield f"{name}, seed {seed}: shuffled choices give k3 {one.k3['shuffled']:.1e}, not 10 x {one.k3['off']:.1e}"


if __name__ == "__main__":
    sys.exit(main())
