"""Random damages of tiny model folders: each is an error that names the tensor or file, or harmless (bit-equal weights).

    python scripts/checks/model_folders.py [--count 60] [--seed 1] [--vllm 0]

The folders: a tied model in one file, an untied one in several, and a mixture of experts.  Each damage is loaded by the training
engines and the hf rollout engine, in this process; `--vllm` has so many of them loaded by vLLM too, seconds each.  The exit
status is 1 if anything was accepted that computes something else, or refused without a name.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.utils.logging import disable_progress_bar

from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import FSDPConfig, MegatronConfig, ModelConfig
from rlhub.engines.rollout.base import GenerationRequest, SamplingParams
from rlhub.engines.rollout.registry import ROLLOUT_ENGINES, RolloutSetup
from rlhub.engines.training.collectives import ensure_process_group
from rlhub.engines.training.registry import TRAIN_ENGINES
from rlhub.errors import RlhubError
from rlhub.models.weight_files import INDEX, SINGLE
from rlhub.protocol.weights.fingerprint import combine, fingerprint
from rlhub.protocol.weights.pieces import Piece

CPU = torch.device("cpu")
VOCABULARY = 67
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1}
ROUNDING = 1e-5
"""Of a log-prob: where equal weights lie in memory decides which of several kernels multiplies them."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Outputs:
    """weights: a fingerprint of them all, by name.  tokens: greedy ones, of an engine that generates."""

    weights: str
    log_probs: list[float]
    tokens: list[int]


@dataclass(slots=True, kw_only=True, frozen=True)
class Damage:
    """kind; folder: which of the models; names: of which an error must name one."""

    kind: str
    folder: str
    names: tuple[str, ...]


def save_models(root: Path) -> list[str]:
    """One in a file, one in several, and a mixture of experts; their names."""
    configs = {
        "tied": (Qwen2Config(**SIZES, **HEADS, tie_word_embeddings=True), "1GB"),
        "sharded": (Qwen3Config(**SIZES, **HEADS, tie_word_embeddings=False), "40KB"),
        "experts": (Qwen3MoeConfig(**SIZES, **HEADS, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16), "1GB"),
    }
    torch.manual_seed(0)
    for name, (config, shard) in configs.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name, max_shard_size=shard)
    return list(configs)


class Folder:
    """A copy of a model folder that may be damaged."""

    def __init__(self, path: Path, chosen: random.Random) -> None:
        self.path, self.chosen = path, chosen
        self.files = sorted(path.glob("*.safetensors"))
        self.file = chosen.choice(self.files)
        self.tensors = load_file(self.file)
        self.tensor = chosen.choice(sorted(self.tensors))

    def write(self) -> None:
        save_file(self.tensors, self.file, {"format": "pt"})

    def lost(self) -> list[str]:
        del self.tensors[self.tensor]
        self.write()
        return [self.tensor]

    def renamed(self) -> list[str]:
        """Also in the index, as by a conversion that went wrong."""
        other = self.tensor.replace("model.", "net.", 1) if self.chosen.random() < 0.5 else f"{self.tensor}_0"
        self.tensors[other] = self.tensors.pop(self.tensor)
        self.write()
        self.edit(INDEX, lambda index: index["weight_map"].update({other: index["weight_map"].pop(self.tensor)}))
        return [self.tensor, other]

    def shape(self) -> list[str]:
        tensor = self.tensors[self.tensor]
        self.tensors[self.tensor] = self.chosen.choice([tensor[:-1], torch.cat([tensor, tensor[:1]])]).contiguous()
        self.write()
        return [self.tensor]

    def nan(self, value: float = float("nan")) -> list[str]:
        flat = self.tensors[self.tensor].reshape(-1)
        flat[self.chosen.randrange(len(flat))] = value
        self.write()
        return [self.tensor]

    def inf(self) -> list[str]:
        return self.nan(self.chosen.choice([float("inf"), -float("inf")]))

    def truncated(self) -> list[str]:
        size = self.file.stat().st_size
        os.truncate(self.file, self.chosen.randrange(size))
        return [self.file.name]

    def header(self) -> list[str]:
        """One byte of the header is another."""
        data = bytearray(self.file.read_bytes())
        data[self.chosen.randrange(8 + int.from_bytes(data[:8], "little"))] ^= 1 << self.chosen.randrange(8)
        self.file.write_bytes(data)
        return [self.file.name, *self.tensors]

    def vocabulary(self) -> list[str]:
        """config.json says another size than the embedding has."""
        size = VOCABULARY + self.chosen.choice([-3, 1, 5])
        self.edit("config.json", lambda config: config.update(vocab_size=size))
        return ["embed_tokens", "lm_head"]

    def layers(self) -> list[str]:
        """config.json says more layers, or fewer."""
        count = self.chosen.choice([1, 3])
        self.edit("config.json", lambda config: config.update(num_hidden_layers=count, layer_types=None))
        return ["model.layers."]

    def missing_file(self) -> list[str]:
        self.file.unlink()
        return [self.file.name, str(self.path)]

    def index(self) -> list[str]:
        """The index names a file that is not there, forgets a tensor, or is cut short."""
        change = self.chosen.randrange(3)
        if not (self.path / INDEX).exists():
            return self.missing_file()
        if change == 0:
            self.edit(INDEX, lambda index: index["weight_map"].update({self.tensor: "model-00009-of-00009.safetensors"}))
        elif change == 1:
            self.edit(INDEX, lambda index: index["weight_map"].pop(self.tensor))
        else:
            os.truncate(self.path / INDEX, self.chosen.randrange((self.path / INDEX).stat().st_size))
        return ["model-00009-of-00009.safetensors", self.tensor, INDEX]

    def harmless(self) -> list[str]:
        """What a loader may leave aside: old buffers, another head, an index beside a file that has everything."""
        choice = self.chosen.randrange(3)
        extra = ("model.layers.0.self_attn.rotary_emb.inv_freq", "score.weight")
        if choice < 2:
            self.tensors[extra[choice]] = torch.ones(4)
            self.write()
            self.edit(INDEX, lambda index: index["weight_map"].update({extra[choice]: self.file.name}))
        elif (self.path / SINGLE).exists():
            (self.path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "gone.safetensors"}}))
        return [*extra, "gone.safetensors"]

    def edit(self, name: str, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
        path = self.path / name
        if path.exists():
            content = json.loads(path.read_text())
            change(content)
            path.write_text(json.dumps(content))


KINDS = (
    "lost",
    "renamed",
    "shape",
    "nan",
    "inf",
    "truncated",
    "header",
    "vocabulary",
    "layers",
    "missing_file",
    "index",
    "harmless",
)


def trained(path: Path, strategy: str) -> Outputs:
    """Log-probs by a training engine."""
    section = MegatronConfig() if strategy == "megatron" else FSDPConfig()
    model = ModelConfig(path=str(path), enable_gradient_checkpointing=False)
    engine = TRAIN_ENGINES.get(strategy)(model, section, None, kind="policy", device=CPU)
    engine.initialize()
    ids = torch.arange(2 * 12).reshape(2, 12) % 60 + 3
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": torch.ones_like(ids)[:, 1:]}
    log_probs = engine.infer(rows, outputs=("log_probs",))["log_probs"].flatten().tolist()
    return Outputs(weights=digest(engine.local_weights() or ()), log_probs=log_probs, tokens=[])


def digest(pieces: Iterable[Piece]) -> str:
    """Of all weights."""
    return combine((piece.name, fingerprint(piece.tensor)) for piece in pieces)


def generated(path: Path, name: str) -> Outputs:
    """Greedy tokens and log-probs by a rollout engine."""
    setup = RolloutSetup(
        config=RolloutConfig(name=name, gpu_memory_utilization=0.2),
        model=ModelConfig(path=str(path)),
        device=CPU,
        seed=1,
        max_prompt_length=8,
        max_response_length=16,
        load_checkpoint=True,
    )
    engine = ROLLOUT_ENGINES.get(name)(setup)
    try:
        engine.initialize()
        params = SamplingParams(temperature=0.0, max_new_tokens=12, stop_token_ids=(), log_probs=True)
        (found,) = engine.generate([GenerationRequest(prompt_ids=[5, 9, 13], seed=1)], params)
        return Outputs(weights=digest(engine.live_weights()), log_probs=found.log_probs, tokens=found.token_ids)
    finally:
        engine.shutdown()


ENGINES: dict[str, Callable[[Path], Outputs]] = {
    "fsdp2": lambda path: trained(path, "fsdp2"),
    "megatron": lambda path: trained(path, "megatron"),
    "hf": lambda path: generated(path, "hf"),
    "vllm": lambda path: generated(path, "vllm"),
}


def outcome(path: Path, load: Callable[[Path], Outputs], sound: Outputs, names: tuple[str, ...]) -> tuple[bool, str]:
    """Whether it is right, and what happened in words."""
    try:
        found = load(path)
    except RlhubError as error:
        named = next((name for name in names if name in str(error)), None)
        return named is not None, f"error, {named}" if named else f"error without a name: {error}"
    except Exception as error:  # noqa: BLE001  # what a raw error is: this is what is looked for
        return False, f"raw {type(error).__name__}: {error}"
    if found == sound:
        return True, "bit-equal"
    difference = max(abs(one - other) for one, other in zip(found.log_probs, sound.log_probs, strict=True))
    same = (found.weights, found.tokens) == (sound.weights, sound.tokens) and difference < ROUNDING
    return same, f"bit-equal weights, log-probs to {difference:.0e}" if same else "ACCEPTED, and computes something else"


def damage(root: Path, target: Path, kind: str, folders: list[str], chosen: random.Random) -> Damage:
    """A damaged copy of one of the folders in `target`."""
    name = chosen.choice(folders)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(root / name, target)
    return Damage(kind=kind, folder=name, names=tuple(getattr(Folder(target, chosen), kind)()))


def run(count: int, seed: int, num_vllm: int, console: Console) -> int:
    """How many outcomes are wrong; prints the table."""
    disable_progress_bar()
    ensure_process_group(CPU)
    chosen, wrong = random.Random(seed), 0
    table = Table("number", "damage", "model", *(("fsdp2", "megatron", "hf") + (("vllm",) if num_vllm else ())))
    with tempfile.TemporaryDirectory() as scratch:
        root, target = Path(scratch), Path(scratch) / "damaged"
        folders = save_models(root)
        used = [name for name in ENGINES if name != "vllm" or num_vllm]
        of_vllm = [name for name in folders if name != "experts"]  # which it has no layers for on a CPU
        sound = {
            (name, engine): ENGINES[engine](root / name)
            for name in folders
            for engine in used
            if engine != "vllm" or name in of_vllm
        }
        for number in track(range(count), "damages", console=Console(stderr=True)):
            one = damage(root, target, KINDS[number % len(KINDS)], folders, chosen)
            row = []
            for engine in used:
                if engine == "vllm" and (number >= num_vllm or one.folder not in of_vllm):
                    row.append("")
                    continue
                right, text = outcome(target, ENGINES[engine], sound[one.folder, engine], one.names)
                wrong += not right
                row.append(text if right else f"WRONG: {text}")
            table.add_row(str(number + 1), one.kind, one.folder, *row)
    console.print(table)
    console.print(f"{count} damages of seed {seed}: {wrong} wrong")
    return wrong


def main() -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=60, help="how many damages (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (default 1)")
    parser.add_argument("--vllm", type=int, default=0, help="how many of the first are loaded by vLLM too (default 0)")
    asked = parser.parse_args()
    return 1 if run(asked.count, asked.seed, asked.vllm, Console(width=170)) else 0


if __name__ == "__main__":
    sys.exit(main())
