"""Metrics of a step that the driver makes of what workers return and of what its phases took, under the field's names; and how
far the policy that samples may be from the one that is trained before the run stops.

Fingerprints prove that a rollout engine has received the weights; what happens to them afterwards, or a kernel that computes
something else, shows only in the log-probs of the tokens it samples.  The actor's ranks measure these against the trainer's as
mismatch/* (rlhub.algorithms.mismatch), and the driver compares the numbers with a bound, before the batch trains.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhub.config.rules.asynchronous import is_async, is_collected
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.rollout_correction import KEY
from rlhub.errors import PolicyMismatchError
from rlhub.pipeline.executor import StepResult
from rlhub.protocol import Batch
from rlhub.utils.timing import NODE_TIME, PREFIX

logger = logging.getLogger(__name__)

PER_RESPONSE_TOKEN = {"gen": "generate_sequences"}
PER_TOKEN = {
    "ref": "compute_ref_log_prob",
    "values": "compute_values",
    "adv": "compute_advantages",
    "update_critic": "update_critic",
    "update_actor": "update_actor",
}
"""The field's name of a phase -> the phase, whose time is divided by the tokens of prompts and responses."""


def mean_metrics(collected: dict[str, list[float]] | dict[str, float]) -> dict[str, float]:
    """Returns one number per metric from what the ranks returned; none for a metric that no rank returned."""
    return {name: sum(v) / len(v) if isinstance(v, list) else float(v) for name, v in collected.items() if v != []}


def graph_metrics(result: StepResult) -> dict[str, float]:
    """Returns the metrics of all nodes of a step that is a graph, and the seconds of each node.  Of a name that several nodes
    report the first has it, and that of the others begins with the node's."""
    metrics: dict[str, float] = {}
    for node, found in result.metrics.items():
        for name, value in mean_metrics(found).items():
            metrics[f"{node}/{name}" if name in metrics else name] = value
    return metrics | {NODE_TIME + name: time.end_s - time.start_s for name, time in result.timings.items()}


def timing_per_token(timings: Mapping[str, float], num_tokens: float, num_response_tokens: float) -> dict[str, float]:
    """Returns timing_per_token_ms/{gen,ref,values,adv,update_critic,update_actor} of the phases that a step has had.

    timings: timing_s/... of the step.  Generation is divided by the response tokens of the batch that trains, the other phases
    by all of its tokens (verl's definition).
    """
    found = {}
    for phases, tokens in ((PER_RESPONSE_TOKEN, num_response_tokens), (PER_TOKEN, num_tokens)):
        for name, phase in phases.items():
            if tokens and PREFIX + phase in timings:
                found[f"timing_per_token_ms/{name}"] = timings[PREFIX + phase] * 1000 / tokens
    return found


def row_lengths(batch: Batch) -> Tensor:
    """Returns the tokens of prompt and response of each row, (rows,) int64."""
    columns = batch.batch
    if "prompt_length" not in columns.keys():
        return torch.as_tensor(columns["attention_mask"].sum(1))
    return torch.as_tensor(columns["prompt_length"] + columns["response_length"])


def source_metrics(batch: Batch, sources: Sequence[str]) -> dict[str, float]:
    """Returns source/<name>/share of the batch's rows for each of these data sources, and of the rows that have a valid score
    source/<name>/reward_mean and source/<name>/pass_rate, the share that validation would count as right."""
    metrics = {}
    for name in sources if "data_source" in batch.non_tensor_batch else ():  # recorded batches say of no row where it is from
        rows = torch.from_numpy(batch.non_tensor_batch["data_source"] == name)
        metrics[f"source/{name}/share"] = rows.double().mean().item()
        rows &= batch.batch["valid"]
        if bool(rows.any()):
            metrics[f"source/{name}/reward_mean"] = batch.batch["scores"][rows].double().mean().item()
            metrics[f"source/{name}/pass_rate"] = batch.batch["correct"][rows].double().mean().item()
    return metrics


BY_PRECISION = {"float32": (1e-3, 0.1), "fewer bits": (0.1, 1.0)}
"""Nats a token to warn at and to stop at, of tokens from the very weights that are trained.  Sound engines: 1e-8 to 1e-5 with
float32 on both sides, 1e-3 to 0.02 with bfloat16 or quantized weights on one (mixtures of experts the most)."""

DRIFT = 0.5
"""Nats a token by which the policy itself may have moved in one version: far more than an update that still learns."""

OF_VERSION = "mismatch/kl/staleness_"


@dataclass(slots=True, kw_only=True, frozen=True)
class MismatchBound:
    """Bounds on mismatch/kl in nats a token; infinite means none.  oldest_keys: versions by which keys and values may be older
    than the token's own."""

    warn: float
    stop: float
    oldest_keys: int = 0

    def check(self, metrics: Mapping[str, float]) -> None:
        """Warns, or raises PolicyMismatchError, by the newest tokens of a step's batch; nothing where none was measured."""
        versions = [int(name.removeprefix(OF_VERSION)) for name in metrics if name.startswith(OF_VERSION)]
        name = f"{OF_VERSION}{min(versions)}" if versions else "mismatch/kl"
        if name not in metrics:
            return
        kl, allowance = metrics[name], DRIFT * max(min(versions, default=0), self.oldest_keys)
        text = (
            f"{name} is {kl:.3g} nats a token: the rollout engine does not sample from the policy that is trained. Its weights "
            "or its arithmetic are wrong (another dtype, a damaged engine, other kernels)"
        )
        if not math.isfinite(kl) or kl > self.stop + allowance:
            bound = self.stop + allowance
            raise PolicyMismatchError(
                f"{text}; the bound is {bound:g}. Nothing of this step was saved: run the command again, which builds the engine "
                f"anew, try rollout.name=hf or rollout.dtype=float32, or raise {KEY}.mismatch_stop",
                kl=kl,
                bound=bound,
            )
        if kl > self.warn + allowance:
            logger.warning("%s; usual is less than %g, and beyond %g the run stops", text, self.warn, self.stop + allowance)


def mismatch_bound(config: PPOConfig) -> MismatchBound:
    """Returns the bound that is set, else that of the precision of both sides.

    There is none by itself where samples are legitimately another policy's (batches of other jobs, a replay) or another
    distribution's (top_p and top_k leave tokens out, whose share counts as mismatch).
    """
    rollout, correction = config.actor_rollout_ref.rollout, config.algorithm.rollout_correction
    others = is_collected(config) or config.trainer.replay_from is not None
    if others or rollout.top_p < 1.0 or rollout.top_k > 0:
        warn = stop = math.inf
    else:
        warn, stop = BY_PRECISION["float32" if _is_exact(config) else "fewer bits"]
    return MismatchBound(
        warn=warn if correction.mismatch_warn is None else correction.mismatch_warn,
        stop=stop if correction.mismatch_stop is None else correction.mismatch_stop,
        oldest_keys=0 if rollout.recompute_kv_cache or not is_async(config) else max(config.trainer.max_staleness, 1),
    )


def _is_exact(config: PPOConfig) -> bool:
    """Returns whether trainer and rollout engine both compute in float32, and with the same weights."""
    rollout, section = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.section
    known = not rollout.remote.urls and rollout.dtype in ("auto", "float32")
    return known and rollout.quantization is None and config.trainer.device == "cpu" and section.model_dtype != "bf16"
