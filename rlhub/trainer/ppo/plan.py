"""The training step as a graph before any process starts: built, checked, and described for `--dry-run`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhub.config.devices import gpu_memory_gb
from rlhub.config.rules.asynchronous import is_async
from rlhub.config.rules.placement import pool_name, pools_of
from rlhub.config.sections.ppo import PPOConfig
from rlhub.pipeline.builtin import dapo, measured, ppo
from rlhub.pipeline.checks import ROLES, declared_columns, find_column
from rlhub.pipeline.columns import StepColumn
from rlhub.pipeline.graph import TaskGraph
from rlhub.pipeline.load import SETTING, build_pipeline
from rlhub.pipeline.nodes import DRIVER
from rlhub.pipeline.show import to_text
from rlhub.trainer.ppo.requirements import requirements
from rlhub.trainer.preflight.memory import estimate_memory

STEP_ROLES = {**ROLES, DRIVER: "rlhub.pipeline.builtin:StepDriver"}
SIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "int32": 4, "int64": 8, "uint8": 1, "bool": 1}
"""Bytes of one value; those of objects are not known before they are there."""


def step_graph(config: PPOConfig) -> TaskGraph | None:
    """Returns the graph of the training step; None where the plain step trains.  Raises ConfigError with all that is wrong."""
    target = config.trainer.pipeline
    if target is None:
        return None
    return build_pipeline(target, config, requirements(config), STEP_ROLES, missing_roles(config), measured)


def missing_roles(config: PPOConfig) -> dict[str, str]:
    """Returns the roles whose workers this job does not have, with the remedy of each."""
    scoring = config.reward_model
    generates = not is_async(config) and config.trainer.replay_from is None
    remedies = {
        "rollout": (generates, "its engines are no workers with rollout.mode=async or trainer.replay_from"),
        "critic": (requirements(config).values, "choose an algorithm.adv_estimator that requires values, such as gae"),
        "reward_model": (scoring.enable, "set reward_model.enable=true"),
        "judge": (bool(scoring.judge.model.path), "set reward_model.judge.model.path"),
    }
    return {role: remedy for role, (there, remedy) in remedies.items() if not there}


def describe(config: PPOConfig) -> str:
    """Returns what a checked configuration would run: its main settings, the graph of a step, where roles run, and the bytes of
    each edge at most.  Without trainer.pipeline the graph is the built-in one that says what the plain step does."""
    same = dapo if config.algorithm.filtering else ppo
    graph = step_graph(config) or same(config, requirements(config)).build(config)
    plain = "" if config.trainer.pipeline else f"({SETTING}=null runs the plain step, which says the same as {graph.name})\n"
    parts = (
        ("configuration", _settings(config)),
        ("checks", "all pass\n"),
        ("graph", plain + to_text(graph)),
        ("placement", _placement(graph, config)),
        ("memory", _memory(config)),
        (f"bytes of a step, all rows at full length (batches by {config.trainer.batches})", _bytes(graph, config)),
    )
    return "\n".join(f"== {title}\n{text}" for title, text in parts)


def _settings(config: PPOConfig) -> str:
    section, data = config.actor_rollout_ref, config.data
    rows = {
        "model": section.model.path,
        "algorithm": f"{config.algorithm.adv_estimator}, loss {section.actor.policy_loss.loss_mode}",
        "batch": f"{data.train_batch_size} prompts x {section.rollout.n} samples, {section.actor.ppo_mini_batch_size} prompts "
        "an optimizer step",
        "tokens": f"at most {data.max_prompt_length} + {data.max_response_length} a row",
        "rollout": f"{section.rollout.name}, mode {section.rollout.mode}, max_staleness {config.trainer.max_staleness}",
        "backend": f"{config.trainer.backend} on {config.trainer.device}, batches by {config.trainer.batches}",
        "run folder": config.trainer.default_local_dir,
    }
    return "".join(f"{name:<12}{value}\n" for name, value in rows.items())


def _placement(graph: TaskGraph, config: PPOConfig) -> str:
    """Returns one line a role: its pool, with the ranks, and the nodes on it."""
    pools = pools_of(config.trainer)
    lines = []
    for role in dict.fromkeys(node.on for node in graph.nodes):
        pool = pool_name(config.trainer, role)
        place = "this process" if role == DRIVER else f"pool {pool}, {_plural(pools[pool].ranks, 'rank')}"
        lines.append(f"{role:<12}{place}: {', '.join(node.name for node in graph.nodes if node.on == role)}\n")
    return "".join(lines)


def _memory(config: PPOConfig) -> str:
    """Returns one line a moment of each pool with what a GPU, or on CPU a process, holds."""
    device_gb = gpu_memory_gb() if config.trainer.device == "cuda" else None
    return "".join(f"{line}\n" for line in estimate_memory(config, device_gb)) or "the sizes of the models are not known here\n"


def _bytes(graph: TaskGraph, config: PPOConfig) -> str:
    """Returns one line an edge with the bytes of its columns, all rows as long as they may be, and of those the part that is one
    number a row: by reference, nothing else passes through the driver's process."""
    columns = declared_columns(graph.nodes)
    rows = [("from", "to", "bytes at most", "one number a row")]
    for edge in graph.edges:
        if edge.columns:
            found = [column for name in edge.columns if (column := find_column(name, columns)) is not None]
            absent = {"pixel": config.env.name is None, "choice": config.actor_rollout_ref.actor.router_replay == "disabled"}
            found = [column for column in found if not any(absent.get(dim) for dim in column.dims)]
            narrow = [column for column in found if not column.wide]
            rows.append((edge.source, edge.target, _size(found, config), _size(narrow, config)))
    widths = [max(map(len, texts)) for texts in zip(*rows, strict=True)]
    return "".join(
        f"{source:<{widths[0]}}  {target:<{widths[1]}}  {size:>{widths[2]}}  {narrow:>{widths[3]}}\n"
        for source, target, size, narrow in rows
    )


def _size(columns: Sequence[StepColumn], config: PPOConfig) -> str:
    """Returns the bytes of columns; a plus sign where they have more, objects of Python."""
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    lengths = {
        "rows": config.data.train_batch_size * config.actor_rollout_ref.rollout.n,
        "prompt": prompt,
        "response": response,
        "sequence": prompt + response,
    }
    known = [column for column in columns if column.dtype in SIZES and lengths.keys() >= set(column.dims)]
    total = sum(SIZES[column.dtype] * math.prod(lengths[dim] for dim in column.dims) for column in known)
    return f"{total:,}{'+' if len(known) < len(columns) else ''}"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
