"""How far one training step of each backend and layout is from a plain Hugging Face loop's, in float32.

    python scripts/bench/backends_agree.py [--markdown]

The same weights and rows everywhere: nine rows of unequal lengths, log-probs and entropy in the loss, cut by a token budget.
Distances are relative: of the loss, and in L2 of the whole gradient and of all weights after one step of gradient descent.
The last lines are controls: a product that is broken on purpose.  The tests hold the same comparison to 1e-5.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from tests.integration import megatron_checks as checks
from tests.integration.fsdp_ranks import Ranks

SIZES = {
    "vocab_size": 67,  # padded where tensor-parallel ranks share it
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "dense": Qwen3Config(**SIZES),
    "experts": Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True),
}
TP2 = {"tensor_model_parallel_size": 2}
CP2 = {"context_model_parallel_size": 2}
RECOMPUTE = {"enable_gradient_checkpointing": True}
Line = tuple[str, str, int, dict[str, Any]]
LINES: list[Line] = [
    ("fsdp2, 1 rank", "dense", 1, {"backend": "fsdp"}),
    ("fsdp2, 2 ranks", "dense", 2, {"backend": "fsdp"}),
    ("megatron TP1", "dense", 1, {}),
    ("megatron TP2", "dense", 2, {"layout": TP2 | {"sequence_parallel": False}}),
    ("megatron TP2, sequence parallel", "dense", 2, {"layout": TP2}),
    ("megatron TP2, sequence parallel, full recompute", "dense", 2, {"layout": TP2, "model": RECOMPUTE}),
    ("megatron PP2", "dense", 2, {"layout": {"pipeline_model_parallel_size": 2}}),
    ("megatron PP2, 2 interleaved pieces", "dense", 2, {"layout": checks.DENSE["vpp"][1]}),
    ("megatron DP2, distributed optimizer", "dense", 2, {}),
    ("megatron DP2", "dense", 2, {"layout": {"use_distributed_optimizer": False}}),
    ("megatron TP2 x PP2", "dense", 4, {"layout": checks.DENSE["tp2xpp2"][1]}),
    ("megatron TP2 x DP2, distributed optimizer", "dense", 4, {"layout": TP2}),
    ("megatron CP2", "dense", 2, {"layout": CP2}),
    ("megatron CP2 x TP2, sequence parallel", "dense", 4, {"layout": CP2 | TP2}),
    ("megatron CP2 x PP2", "dense", 4, {"layout": checks.DENSE["cp2xpp2"][1]}),
    ("fsdp2, mixture of experts, 2 ranks", "experts", 2, {"backend": "fsdp"}),
    ("megatron, mixture of experts, TP1", "experts", 1, {}),
    ("megatron, mixture of experts, EP2", "experts", 2, {"layout": checks.EXPERTS["ep2"][1]}),
    ("megatron, mixture of experts, EP2 x TP2", "experts", 4, {"layout": checks.EXPERTS["ep2xtp2"][1]}),
    ("megatron, mixture of experts, EP2 x CP2", "experts", 4, {"layout": checks.EXPERTS["ep2"][1] | CP2}),
    ("control: loss x 1.001, TP2", "dense", 2, {"layout": TP2, "damage": "loss"}),
    ("control: one weight's sign flipped, TP2", "dense", 2, {"layout": TP2, "damage": "weight"}),
    ("control: gradients of q and k norms not summed, TP2", "dense", 2, {"layout": TP2, "damage": "norms"}),
    ("control: context-parallel ranks exchange nothing, CP2", "dense", 2, {"layout": CP2, "damage": "exchange"}),
]


def save_models(folder: Path) -> None:
    for name, config in CONFIGS.items():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config)
        for param in model.parameters():  # away from the zeros and ones of a fresh model
            param.data.add_(torch.randn_like(param) * 0.1)
        model.save_pretrained(folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--markdown", action="store_true", help="print the table as README.md has it")
    arguments = parser.parse_args()
    separator = " | " if arguments.markdown else "  "
    rows: list[tuple[str, ...]] = [("backend and layout", "ranks", "loss", "gradient", "weights after a step")]
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        save_models(folder)
        ranks = Ranks(4, preload="tests.integration.megatron_checks")
        for number, (title, model, world, case) in enumerate(LINES):
            found = ranks.call(checks.agreement, world, str(folder / f"group{number}"), str(folder / model), "policy", case)
            worst = {what: max(result[what] for result in found if result) for what in ("loss", "gradient", "weights")}
            rows.append((title, str(world), *(f"{value:.1e}" for value in worst.values())))
        ranks.close()
    if arguments.markdown:
        rows.insert(1, ("---",) * len(rows[0]))
    widths = [0 if arguments.markdown else max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        line = separator.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(f"| {line} |" if arguments.markdown else line.rstrip())


if __name__ == "__main__":
    main()
