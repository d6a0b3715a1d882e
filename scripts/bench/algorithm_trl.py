"""Whether rlhub's algorithms compute the numbers of TRL 1.16 where both define them.

    python scripts/bench/algorithm_trl.py

The same random inputs for both, values and gradients of losses, in float64 and float32, one process, about 20 s (most of
it imports).  Exit status 1 where the numbers differ and no docstring of rlhub says why, or agree though they are listed as
different.  TRL's side is algorithm_trl_calls.py; verl's is compared by algorithm_cost.py.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded

import algorithm_inputs as drawn
import algorithm_rlhub as ours
import algorithm_trl_calls as trl
import torch
from algorithm_cost import difference, documented
from algorithm_inputs import Batch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlhub.algorithms import statistics
from rlhub.algorithms.correction.correct import kept
from rlhub.algorithms.correction.weights import RATIOS, bounded
from rlhub.algorithms.masked import aggregate
from rlhub.algorithms.preference import PreferenceInputs, bradley_terry
from rlhub.algorithms.registry import KL_ESTIMATORS, PREFERENCE_LOSSES
from rlhub.config.sections.rollout_correction import Bounds, weight_bounds
from rlhub.engines.training.fsdp.logprob import token_outputs

Numbers = dict[str, Tensor]
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Of numbers relative to the largest of their tensor."""
GROUP = 6
THEIR_EPS = 1e-4  # beside a standard deviation
CLIPS = {"clip_ratio_low": drawn.CLIP_LOW, "clip_ratio_high": drawn.CLIP_HIGH}
NO_DUAL_CLIP = {"clip_ratio_c": 1e6}
DELTA = 1.5  # of the dual clip, low enough to bind
ROWS, TOKENS, SCALED, SUMS = "seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm", "seq-mean-token-sum"
BETA, SMOOTHING = 0.1, 0.2
OFF_POLICY = 0.02
TAU = (1.0, 1.25)  # TRL holds them in float32, where the default 1.05 is rounded
_HERE = "rlhub.algorithms"


@dataclass(slots=True, kw_only=True)
class Case:
    """mine, theirs: names for the table.  differs: (module, words of a docstring in it) where the numbers are to differ."""

    mine: str
    theirs: str
    rlhub: Callable[[], Numbers]
    trl: Callable[[], Numbers]
    differs: tuple[str, str] | None = None


NOT_COMPARED = (
    ("gae, value_loss, whiten_rewards", "no PPO in TRL 1.16"),
    ("grpo_passk, opo, gpg, cpgd, remax, reinforce_plus_plus(_baseline), optimal_token_baseline", "not in TRL"),
    ("the losses clip_cov, kl_cov, dppo_tv, dppo_kl, cpgd, gpg, reinforce; M2PO, A-3PO, normalised weights", "not in TRL"),
    ("rejection by other rules", "TRL's masks zero weights outside a band, as rlhub's weights by band do (above)"),
    ("weights by band", "TRL's truncate modes with clip_min raise small weights to it; rlhub has no such form"),
    ("(none)", "vespo, top_entropy_quantile, adaptive entropy_coef, scale_rewards=batch, use_bias_correction_kl: not in rlhub"),
    ("(none)", "the loss of RLOOTrainer, which clips the ratio of summed log-probs: rlhub's rloo goes with any policy loss"),
    ("(none)", "KTOTrainer and DPO's other losses (exo_pair, nca_pair, bco_pair, sppo_hard, apo_*, discopop): not in rlhub"),
    ("entropy_coeff", "TRL's bonus is a token mean whatever the loss, rlhub's follows loss_agg_mode, inside the update"),
    ("sft", "the loss is the model's own (mean of -log p over tokens), not a method's"),
)
"""(rlhub's, TRL's or why) without common numbers."""


def batch(dtype: torch.dtype, **shape: Any) -> Batch:
    """The drawn batch; the rollout engine's log-probs are float32 numbers, which is how TRL keeps them."""
    b = drawn.batch(**shape)
    b.rollout_log_probs = b.rollout_log_probs.float().double()
    for name in Batch.__slots__:
        column = getattr(b, name)
        if column.dtype == torch.float64:
            setattr(b, name, column.to(dtype))
    return b


def estimated(name: str, given: Batch, scores: Tensor, **knobs: Any) -> Callable[[], Numbers]:
    return lambda: {"advantages": ours.estimate(name, ours.inputs(given, scores), **knobs)["advantages"]}


def advantages(dtype: torch.dtype) -> Iterator[Case]:
    b, one = batch(dtype, group=GROUP), batch(dtype, group=1)
    rewards, alone = b.per_row[:, None], one.per_row[:, None]
    mine = estimated("grpo", b, b.scores)

    def theirs(**settings: Any) -> Callable[[], Numbers]:
        return lambda: trl.advantages(b, rewards, GROUP, **settings)

    def with_their_constant() -> Numbers:
        with mock.patch.object(statistics, "STD_EPS", THEIR_EPS):
            return mine()

    differs = (f"{_HERE}.advantages.grpo", "elsewhere 1e-4 is added")
    yield Case(mine="grpo", theirs="GRPO", rlhub=mine, trl=theirs(), differs=differs)
    yield Case(mine="grpo, 1e-4 added", theirs="GRPO", rlhub=with_their_constant, trl=theirs())
    centred = estimated("grpo", b, b.scores, norm_adv_by_std_in_grpo=False)
    yield Case(mine="grpo without std", theirs="GRPO, scale_rewards=none", rlhub=centred, trl=theirs(scale_rewards="none"))
    rloo = theirs(trainer=trl.RLOOTrainer)
    yield Case(mine="rloo", theirs="RLOO", rlhub=estimated("rloo", b, b.scores), trl=rloo)
    for name, trainer in (("grpo", trl.GRPOTrainer), ("rloo", trl.RLOOTrainer)):
        yield Case(
            mine=f"{name}, groups of one",
            theirs=f"{name.upper()}, num_generations=1",
            rlhub=estimated(name, one, one.scores),
            trl=lambda trainer=trainer: trl.advantages(one, alone, 1, trainer),  # type: ignore[misc]
        )


def penalised_advantages(dtype: torch.dtype) -> Iterator[Case]:
    """The KL to the reference inside the reward; TRL's RLOO knows no mask of tool output."""
    b = batch(dtype, group=GROUP)
    b.mask = torch.ones_like(b.mask)
    penalty = BETA * KL_ESTIMATORS.get("k1")(b.old_log_probs, b.rollout_log_probs)
    rewards = torch.cat([-penalty[:, :-1], b.per_row[:, None] - penalty[:, -1:]], 1)
    yield Case(
        mine="rloo, KL k1 in the reward",
        theirs="RLOO, beta",
        rlhub=estimated("rloo", b, rewards),
        trl=lambda: trl.advantages(b, b.per_row[:, None], GROUP, trl.RLOOTrainer, beta=BETA),
    )


def decoupled_advantages(dtype: torch.dtype) -> Iterator[Case]:
    """Several reward functions, each compared on its own scale."""
    b, single = batch(dtype, group=GROUP), batch(dtype, group=GROUP)
    single.mask = torch.zeros_like(b.mask).index_fill_(1, torch.tensor([0]), 1)
    single.scores = b.per_row[:, None] * single.mask
    rewards = torch.stack([b.per_row, 3 * b.values[:, 0]], 1)

    def mine(given: Batch) -> Numbers:
        components = dict(zip(("first", "second"), rewards.unbind(1), strict=True))
        found = ours.estimate("gdpo", ours.inputs(given, given.scores, reward_components=components))
        return {"advantages": found["advantages"]}

    def theirs(given: Batch) -> Numbers:
        return trl.advantages(given, rewards, GROUP, multi_objective_aggregation="normalize_then_sum")

    def scaled(numbers: Numbers) -> Numbers:
        return {name: values / values.abs().max() for name, values in numbers.items()}

    def with_their_constant() -> Numbers:
        with mock.patch.object(statistics, "STD_EPS", THEIR_EPS):
            return scaled(mine(single))

    name, differs = "GRPO, normalize_then_sum", (f"{_HERE}.advantages.gdpo", "whitened over the batch's model tokens")
    yield Case(mine="gdpo", theirs=name, rlhub=lambda: mine(b), trl=lambda: theirs(b), differs=differs)
    label = "gdpo of one-token responses, 1e-4 added, up to its scale"
    yield Case(mine=label, theirs=name, rlhub=with_their_constant, trl=lambda: scaled(theirs(single)))


def clipped_losses(dtype: torch.dtype) -> Iterator[Case]:
    """The clipped surrogate, in every aggregation of TRL; then what is cut, weighted or has rows without tokens."""
    b, empty, wide = batch(dtype), batch(dtype), batch(dtype)  # wide: far off policy
    empty.mask[5] = 0
    wide.log_probs = (wide.old_log_probs + 5 * (wide.log_probs - wide.old_log_probs)).clamp(max=-1e-3)

    def vanilla(mode: str, given: Batch = b, **knobs: Any) -> Callable[[], Numbers]:
        knobs = {**CLIPS, **NO_DUAL_CLIP, **knobs}
        return lambda: ours.loss("vanilla", given, given.advantages, given.log_probs, mode, **knobs)

    def theirs(loss_type: str, given: Batch = b, **settings: Any) -> Callable[[], Numbers]:
        return lambda: trl.grpo_loss(given, given.advantages, loss_type, **settings)

    for loss_type, mode in (("grpo", ROWS), ("bnpo", TOKENS), ("dr_grpo", SCALED), ("dapo", TOKENS), ("luspo", SUMS)):
        yield Case(mine=f"vanilla, {mode}", theirs=loss_type, rlhub=vanilla(mode), trl=theirs(loss_type))
    equal: dict[str, Any] = {"clip_ratio_low": drawn.CLIP_LOW, "clip_ratio_high": drawn.CLIP_LOW}
    even = theirs("dapo", epsilon_high=drawn.CLIP_LOW)
    yield Case(mine="vanilla, one clip_ratio", theirs="dapo, epsilon", rlhub=vanilla(TOKENS, **equal), trl=even)
    dual = vanilla(TOKENS, clip_ratio_c=DELTA)
    yield Case(mine="vanilla, clip_ratio_c", theirs="dapo, delta", rlhub=dual, trl=theirs("dapo", delta=DELTA))
    yield Case(
        mine="vanilla at its default clip_ratio_c, far off policy",
        theirs="dapo",
        rlhub=vanilla(TOKENS, wide, clip_ratio_c=3.0),
        trl=theirs("dapo", wide),
        differs=(f"{_HERE}.policy_losses.vanilla", "always on (elsewhere off until asked for)"),
    )
    weighted = theirs("dapo", weights=b.weights)
    yield Case(mine="vanilla, weighted", theirs="dapo, vLLM's ratio", rlhub=vanilla(TOKENS, weights=b.weights), trl=weighted)
    for loss_type, mode in (("grpo", ROWS), ("dapo", TOKENS)):
        cut = theirs(loss_type, cuts=2)
        yield Case(mine=f"vanilla, {mode}", theirs=f"{loss_type} in two micro-batches", rlhub=vanilla(mode), trl=cut)
    yield Case(
        mine=f"vanilla, {TOKENS}",
        theirs="bnpo in two micro-batches",
        rlhub=vanilla(TOKENS),
        trl=theirs("bnpo", cuts=2),
        differs=(f"{_HERE}.masked", "the gradient does not depend on how the mini-batch is cut"),
    )
    yield Case(
        mine=f"vanilla, {ROWS}, a row without tokens",
        theirs="grpo",
        rlhub=vanilla(ROWS, empty),
        trl=theirs("grpo", empty),
        differs=(f"{_HERE}.masked", "B excludes fully masked rows"),
    )


def other_losses(dtype: torch.dtype) -> Iterator[Case]:
    b = batch(dtype)
    sequence, per_row = b.sequence_advantages, b.per_row

    def mine(name: str, mode: str, given: Tensor, **knobs: Any) -> Callable[[], Numbers]:
        return lambda: ours.loss(name, b, given, b.log_probs, mode, **knobs)

    def theirs(loss_type: str, given: Tensor = b.advantages, **settings: Any) -> Callable[[], Numbers]:
        return lambda: trl.grpo_loss(b, given, loss_type, **settings)

    near = {"clip_low": drawn.SEQUENCE_CLIP_LOW, "clip_high": drawn.SEQUENCE_CLIP_HIGH}
    level = {"importance_sampling_level": "sequence", "epsilon_low": near["clip_low"], "epsilon_high": near["clip_high"]}
    grpo, luspo = theirs("grpo", per_row, **level), theirs("luspo", per_row, **level)
    yield Case(mine=f"gspo, {ROWS}", theirs="grpo, sequence level", rlhub=mine("gspo", ROWS, sequence, **near), trl=grpo)
    yield Case(mine=f"gspo, {SUMS}", theirs="luspo, sequence level", rlhub=mine("gspo", SUMS, sequence, **near), trl=luspo)
    yield Case(
        mine="gspo at its default bounds",
        theirs="grpo, sequence level, default epsilon",
        rlhub=mine("gspo", ROWS, sequence),
        trl=theirs("grpo", per_row, importance_sampling_level="sequence", epsilon_high=drawn.CLIP_LOW),
        differs=(f"{_HERE}.policy_losses.gspo", "so PPO's 0.2, which other implementations read here, never clips"),
    )
    high = drawn.CLIP_HIGH
    capped = mine("cispo", TOKENS, b.advantages, clip_high=high)
    yield Case(
        mine="cispo, clip_high", theirs="cispo, 1 + epsilon_high", rlhub=capped, trl=theirs("cispo", epsilon_high=1 + high)
    )
    yield Case(
        mine="cispo, clip_high",
        theirs="cispo, epsilon_high",
        rlhub=capped,
        trl=theirs("cispo"),
        differs=(f"{_HERE}.policy_losses.cispo", "elsewhere the bound itself is given"),
    )
    gates = theirs("sapo", sapo_temperature_pos=TAU[0], sapo_temperature_neg=TAU[1])
    soft = mine("sapo", ROWS, b.advantages, tau_pos=TAU[0], tau_neg=TAU[1])
    yield Case(mine="sapo", theirs="sapo", rlhub=soft, trl=gates)
    both = {"clip_low": 0.4, "clip_high": 0.3}
    gmpo = theirs("gmpo", per_row, trainer=trl.GMPOTrainer, epsilon_low=0.4, epsilon_high=0.3)
    yield Case(mine="geo_mean", theirs="experimental GMPO", rlhub=mine("geo_mean", ROWS, sequence, **both), trl=gmpo)
    for near_by in (True, False):
        reference = b.rollout_log_probs if near_by else b.log_probs + 3 * b.values
        yield Case(
            mine="KL k3 as a loss" + ("" if near_by else ", far from the reference"),
            theirs="grpo, beta",
            rlhub=lambda reference=reference: kl_loss(b, reference),  # type: ignore[misc]
            trl=theirs("grpo", 0 * per_row, beta=BETA, reference=reference),
            differs=None if near_by else (f"{_HERE}.kl", "at most 10: unbiased but for the clamps"),
        )


def kl_loss(b: Batch, reference: Tensor) -> Numbers:
    current = b.log_probs.clone().requires_grad_()
    kl = KL_ESTIMATORS.get("k3")(current, reference)
    value = BETA * aggregate(kl, b.mask, ROWS, ours.denominators(b))
    return {"loss": value.detach(), "gradient": torch.autograd.grad(value, current)[0]}


def corrections(dtype: torch.dtype) -> Iterator[Case]:
    b = batch(dtype)
    old, now = ((x - b.rollout_log_probs) * b.mask for x in (b.old_log_probs, b.log_probs))

    def weighted(level: str, threshold: float | str) -> Callable[[], Numbers]:
        return lambda: {"weights": bounded(RATIOS[level](old, b.mask), b.mask, weight_bounds(threshold))}

    def passed() -> Numbers:
        return {"kept": kept(now, b.mask, "seq_mean_k1", Bounds(lower=1e-6, upper=math.exp(OFF_POLICY))).double()}

    for level in ("token", "sequence"):
        for threshold, mode, low, high in ((1.5, "truncate", None, 1.5), ("0.7_1.4", "mask", 0.7, 1.4)):
            yield Case(
                mine=f"weights by {level}, {threshold}",
                theirs=f"{level}_{mode}",
                rlhub=weighted(level, threshold),
                trl=lambda name=f"{level}_{mode}", low=low, high=high: trl.weights(b, name, low, high),  # type: ignore[misc]
            )
    negative = -b.per_row.abs()
    mask = "off_policy_mask_threshold"
    yield Case(
        mine="rejection seq_mean_k1, upper bound",
        theirs=f"{mask}, negative rows",
        rlhub=passed,
        trl=lambda: trl.off_policy_kept(b, negative, OFF_POLICY),
    )
    yield Case(
        mine="rejection seq_mean_k1, upper bound",
        theirs=mask,
        rlhub=passed,
        trl=lambda: trl.off_policy_kept(b, b.per_row, OFF_POLICY),
        differs=(f"{_HERE}.correction.correct", "None of these rules looks at advantages"),
    )


def preferences(dtype: torch.dtype) -> Iterator[Case]:
    b = batch(dtype)
    lengths = b.mask.sum(1)

    def mine(name: str, per_token: bool = False, **knobs: Any) -> Callable[[], Numbers]:
        return lambda: preference(b, name, lengths if per_token else None, **knobs)

    def theirs(loss_type: str, smoothing: float = 0.0) -> Callable[[], Numbers]:
        return lambda: trl.dpo_loss(b, loss_type, BETA, smoothing)

    yield Case(mine="DPO sigmoid", theirs="sigmoid", rlhub=mine("sigmoid"), trl=theirs("sigmoid"))
    smoothed, robust = mine("sigmoid", label_smoothing=SMOOTHING), theirs("robust", SMOOTHING)
    yield Case(
        mine="DPO sigmoid, label_smoothing", theirs="aot_unpaired, pair by pair", rlhub=smoothed, trl=lambda: one_by_one(b)
    )
    yield Case(
        mine="DPO sigmoid, label_smoothing",
        theirs="robust",
        rlhub=smoothed,
        trl=robust,
        differs=(f"{_HERE}.preference", "Nor is the conservative form the robust form of Chowdhury et al."),
    )
    yield Case(mine="DPO hinge", theirs="hinge", rlhub=mine("hinge"), trl=theirs("hinge"))
    yield Case(
        mine="IPO",
        theirs="ipo",
        rlhub=mine("ipo"),
        trl=theirs("ipo"),
        differs=(f"{_HERE}.preference", "Elsewhere IPO's are means over the tokens"),
    )
    yield Case(mine="IPO, given means over tokens", theirs="ipo", rlhub=mine("ipo", True), trl=theirs("ipo"))
    margin = b.values[:24, 0].abs()
    for given in (None, margin):
        yield Case(
            mine="reward model" + ("" if given is None else ", margin"),
            theirs="RewardTrainer" + ("" if given is None else ", margin"),
            rlhub=lambda given=given: reward(b.per_row, given),  # type: ignore[misc]
            trl=lambda given=given: trl.reward_loss(b.per_row, given),  # type: ignore[misc]
        )


def preference(b: Batch, name: str, lengths: Tensor | None, **knobs: Any) -> Numbers:
    """The first half of the rows was preferred to the second; log-probs are sums, or means over `lengths`."""
    current = b.log_probs.clone().requires_grad_()
    divisor = 1 if lengths is None else lengths
    chosen, rejected = ((current * b.mask).sum(1) / divisor).chunk(2)
    ref_chosen, ref_rejected = ((b.rollout_log_probs * b.mask).sum(1) / divisor).chunk(2)
    inputs = PreferenceInputs(chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    knobs_class: Any = PREFERENCE_LOSSES.knobs_class(name)
    loss = PREFERENCE_LOSSES.get(name)(inputs, knobs_class(beta=BETA, **knobs)).mean()
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, current)[0]}


def one_by_one(b: Batch) -> Numbers:
    """TRL's sigmoid takes no label smoothing; its optimal transport of one pair is the conservative sigmoid."""
    pairs = len(b.mask) // 2
    gradient, total = torch.zeros_like(b.log_probs), torch.zeros((), dtype=b.log_probs.dtype)
    for pair in range(pairs):
        rows = torch.tensor([pair, pair + pairs])
        single = Batch(**{name: getattr(b, name)[rows] for name in Batch.__slots__})
        found = trl.dpo_loss(single, "aot_unpaired", BETA, SMOOTHING)
        total, gradient[rows] = total + found["loss"] / pairs, found["gradient"] / pairs
    return {"loss": total, "gradient": gradient}


def reward(scores: Tensor, margin: Tensor | None) -> Numbers:
    current = scores.clone().requires_grad_()
    chosen, rejected = current.chunk(2)
    loss = bradley_terry(chosen, rejected, margin).mean()
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, current)[0]}


def tokens(dtype: torch.dtype) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in ((130, 16), (57, 16)))
    targets = torch.randint(57, (130,), generator=generator)
    for temperature in (1.0, 0.7):

        def mine(temperature: float = temperature) -> Numbers:
            given = hidden.clone().requires_grad_()
            found = token_outputs(given, weight, None, targets, temperature=temperature, wanted={"log_probs", "entropy"})
            (gradient,) = torch.autograd.grad(found["log_probs"].sum() + found["entropy"].square().sum(), given)
            return {name: value.detach() for name, value in found.items()} | {"gradient": gradient}

        def theirs(temperature: float = temperature) -> Numbers:
            return trl.token_numbers(hidden, weight, targets, temperature)

        name = f"log-probs and entropy, temperature {temperature}"
        yield Case(mine=name, theirs="selective_log_softmax_and_entropy", rlhub=mine, trl=theirs)


FAMILIES = (
    advantages,
    penalised_advantages,
    decoupled_advantages,
    clipped_losses,
    other_losses,
    corrections,
    preferences,
    tokens,
)


def cases(dtype: torch.dtype = torch.float64) -> list[Case]:
    return [case for family in FAMILIES for case in family(dtype)]


def distance(case: Case) -> float:
    """The largest difference of both sides, which give 0 outside their masks."""
    return difference(case.rlhub(), case.trl(), torch.zeros(0))


def good(case: Case, far: float, dtype: torch.dtype = torch.float64) -> bool:
    """Agrees, or differs as a docstring says; what is to differ is judged in float64 alone."""
    if case.differs is None:
        return far <= TOLERANCES[dtype]
    return documented(*case.differs) and (far > TOLERANCES[dtype] or dtype != torch.float64)


def main() -> None:
    torch.set_num_threads(1)
    table = Table(title="The same random inputs: values, and gradients of losses; largest relative difference")
    for column in ("rlhub", "TRL", "float64", "float32", "", "why"):
        table.add_column(column)
    fine = True
    for case, narrow in zip(cases(), cases(torch.float32), strict=True):
        far, farther = distance(case), distance(narrow)
        passed = good(case, far) and good(narrow, farther, torch.float32)
        verdict = "differ" if far > TOLERANCES[torch.float64] else "agree"
        why = ": ".join(case.differs or ())
        mark = verdict if passed else f"[red]{verdict}, which no docstring says"
        table.add_row(case.mine, case.theirs, f"{far:.1e}", f"{farther:.1e}", mark, why)
        fine = fine and passed
    console = Console(width=200)
    console.print(table)
    rest = Table(title="Not comparable")
    for column in ("rlhub", "TRL, or why"):
        rest.add_column(column)
    for row in NOT_COMPARED:
        rest.add_row(*row)
    console.print(rest)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
