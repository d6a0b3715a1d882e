"""Which command lines of the established configuration pass every check before the start, and what the others are told.

    python scripts/checks/command_lines.py LINES.jsonl [--replace NAME=VALUE ...] [--only WORD] [--messages]

A line of the file is {"name": ..., "arguments": [...]}, with "main": ppo (the default) or sft.  Data, models, reward and other
paths are replaced by tiny ones made here, whose sizes suit any usual cut of a model; nothing is started, and no tracker's
login is asked for.

The exit status is 1 if more lines are refused than --refused allows.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlhub.config.cli import run
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.trainer.preflight import checks as preflight

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "max_position_embeddings": 1 << 20,
}
"""Sizes with many divisors, for tensor, pipeline and context parallelism."""
EXPERTS = MODEL | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 4,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
CUT_EXPERTS = "expert_model_parallel_size="
ROW = {
    "prompt": [{"role": "user", "content": "1+1="}],
    "messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}],
    "question": "1+1=",
    "answer": "2",
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0, "question": "1+1=", "answer": "2"},
}
TOOLS = "tools:\n  - name: calculator\n"
PLACES = {
    "data.train_files": "TRAIN",
    "data.val_files": "VAL",
    "actor_rollout_ref.model.path": "MODEL",
    "critic.model.path": "MODEL",
    "reward_model.model.path": "MODEL",
    "reward.reward_model.model_path": "MODEL",
    "reward_model.model.input_tokenizer": "MODEL",
    "model.path": "MODEL",
    "model.partial_pretrain": "MODEL",
    "custom_reward_function.path": "REWARD",
    "reward.custom_reward_function.path": "REWARD",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "TOOLS",
    "trainer.default_local_dir": "RUN",
}
"""Setting -> what replaces its value wherever it is given."""
MAINS: dict[str, tuple[type[Any], str, Callable[..., list[str]]]] = {
    "ppo": (PPOConfig, "ppo", preflight.check_training),
    "sft": (SFTConfig, "sft", preflight.check),
}


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of a line: problems ([]: it passes) and warnings."""

    name: str
    problems: Sequence[str]
    warnings: Sequence[str]


def make_places(folder: Path) -> dict[str, str]:
    """Tiny files and folders for every placeholder, written to `folder`."""
    for name, config in (("model", MODEL), ("experts", EXPERTS)):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "rows.jsonl").write_text("".join(json.dumps(ROW) + "\n" for _ in range(8)))
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    )
    (folder / "tools.yaml").write_text(TOOLS)
    rows = str(folder / "rows.jsonl")
    return {
        "TRAIN": rows,
        "VAL": rows,
        "MODEL": str(folder / "model"),
        "EXPERTS": str(folder / "experts"),
        "REWARD": str(folder / "reward.py"),
        "TOOLS": str(folder / "tools.yaml"),
        "RUN": str(folder / "run"),
    }


def replaced(arguments: Sequence[str], places: Mapping[str, str]) -> list[str]:
    """The arguments with every path replaced; a model that is cut over experts has some."""
    sparse = any(CUT_EXPERTS in text and not text.endswith("=1") for text in arguments)
    found = dict(places) | ({"MODEL": places["EXPERTS"]} if sparse else {})
    return [_replaced(text, found) for text in arguments]


def _replaced(text: str, places: Mapping[str, str]) -> str:
    key, sign, value = text.partition("=")
    place = PLACES.get(key.lstrip("+"))
    if sign and place is not None and value not in ("", "null"):
        return f"{key}={places[place]}"
    return f"{key}={places[value]}" if value in places else text


def outcome(name: str, main: str, arguments: Sequence[str]) -> Outcome:
    """What the main of a command line says to it with --check."""
    config_class, config_name, check = MAINS[main]
    warnings, out, err = _Warnings(), io.StringIO(), io.StringIO()
    logging.getLogger().addHandler(warnings)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(config_class, config_name, _not_started, description="", preflight=check, argv=[*arguments, "--check"])
    finally:
        logging.getLogger().removeHandler(warnings)
    said = [line.strip() for line in err.getvalue().splitlines() if line.strip()]
    problems = said[1:] if len(said) > 1 and "problems in the configuration" in said[0] else said
    return Outcome(name=name, problems=problems if code else [], warnings=warnings.texts)


def _not_started(config: Any) -> int:
    raise AssertionError("--check starts nothing")


class _Warnings(logging.Handler):
    """Keeps the texts of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def show(outcomes: Sequence[Outcome], *, messages: bool) -> None:
    """The table, and with `messages` what each line was told."""
    console, table = Console(), Table("command line", "checks", "problems", "warnings")
    for found in outcomes:
        passes = "refused" if found.problems else "pass"
        table.add_row(found.name, passes, str(len(found.problems)), str(len(found.warnings)))
    for found in outcomes if messages else ():
        console.print(f"[bold]{found.name}[/bold]", highlight=False)
        for kind, texts in (("error", found.problems), ("warning", found.warnings)):
            for text in texts:
                console.print(f"  {kind}: {text}", markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    passed = sum(not found.problems for found in outcomes)
    console.print(f"{passed} of {len(outcomes)} pass all checks")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path, help="jsonl file of command lines")
    parser.add_argument("--replace", action="append", default=[], metavar="NAME=VALUE", help="a placeholder's own value")
    parser.add_argument("--only", default="", metavar="WORD", help="lines whose name holds this")
    parser.add_argument("--messages", action="store_true", help="print what each line was told")
    parser.add_argument("--refused", type=int, default=0, help="lines that may be refused (default %(default)s)")
    options = parser.parse_args(arguments)
    lines = [json.loads(line) for line in options.lines.read_text(encoding="utf-8").splitlines() if line.strip()]
    outcomes = []
    logging.getLogger().addHandler(logging.NullHandler())  # the mains would set up their own
    with tempfile.TemporaryDirectory(prefix="command-lines-") as folder:
        places = make_places(Path(folder)) | dict(text.split("=", 1) for text in options.replace)
        for line in lines:
            if options.only in line["name"]:
                outcomes.append(outcome(line["name"], line.get("main", "ppo"), replaced(line["arguments"], places)))
                sys.stderr.write(f"\r{len(outcomes)} of {len(lines)}")
    sys.stderr.write("\n")
    show(outcomes, messages=options.messages)
    return 1 if sum(bool(found.problems) for found in outcomes) > options.refused else 0


if __name__ == "__main__":
    sys.exit(main())
