"""Recorded values of every formula on fixed inputs: computes them anew and compares, or rewrites the record.

    .venv/bin/python scripts/golden.py            # compare with tests/golden/*.json; lists what changed
    .venv/bin/python scripts/golden.py --update   # record a deliberate change; commit the difference with its reason

Tests against slow references say that a formula is right; this says that nobody changed it without noticing.  The inputs come
from integer arithmetic in float64, so they depend on no random generator.  Parts are taken from the registries: a new
estimator or loss has no record until --update is run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhub.algorithms import aggregation, kl_control, mismatch, rewards
from rlhub.algorithms.correction import a3po, correct
from rlhub.algorithms.inputs import AdvantageInputs, PolicyLossInputs, SelectionInputs
from rlhub.algorithms.masked import masked, whiten
from rlhub.algorithms.preference import PreferenceInputs, bradley_terry
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, PREFERENCE_LOSSES
from rlhub.algorithms.value_loss import value_loss
from rlhub.config.sections.rollout_correction import DIVERGENCE_RULES, RATIO_RULES, RolloutCorrectionConfig
from rlhub.registry import Registry

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "golden"
COMMAND = ".venv/bin/python scripts/golden.py --update"
VERSION = 1  # of the inputs below: another number means that all cases changed with them
DIGITS = 12  # significant ones recorded
TOLERANCE = 1e-10  # relative, above rounding by another libm and far below any formula

MASK = torch.tensor(
    [[1, 1, 1, 0, 0], [1, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 1, 0]]
)
"""One turn, several turns, one token, none."""
GROUP = torch.tensor([0, 1, 0, 1, 0, 2, 1])
"""Uneven groups whose rows lie apart, one of a single sample."""
ROWS, WIDTH = MASK.shape

# Settings recorded besides the defaults: those that choose another branch of the formula.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "advantage estimator gae": [{"gamma": 0.9, "lam": 0.8}],
    "advantage estimator grpo": [{"norm_adv_by_std_in_grpo": False}],
    "advantage estimator grpo_passk": [{"norm_adv_by_std_in_grpo": False}],
    "advantage estimator reinforce_plus_plus": [{"gamma": 0.9}],
    "advantage estimator remax": [{"gamma": 0.9}],
    "advantage estimator optimal_token_baseline": [{"gamma": 0.9}],
    "advantage estimator gdpo": [{"reward_weights": {"format": 0.25}}],
    "policy loss vanilla": [{"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 1.2}],
    "policy loss gspo": [{"clip_low": 0.1, "clip_high": 0.1}],
    "policy loss cispo": [{"clip_low": 0.1, "clip_high": 0.28}],
    "policy loss geo_mean": [{"clip_low": 0.1, "clip_high": 0.2}],
    "policy loss cpgd": [{"clip_ratio_low": 0.1, "drift_coef": 0.5, "drift_bound": 0.2}],
    "policy loss clip_cov": [{"clip_cov_ratio": 0.3, "clip_cov_lb": 0.0, "clip_cov_ub": 2.0}],
    "policy loss kl_cov": [{"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.5}],
    "policy loss dppo_tv": [{"divergence_low": 0.02, "divergence_high": 0.03, "ratio_cap": 1.1}],
    "policy loss dppo_kl": [{"divergence_low": 0.002, "divergence_high": 0.003, "ratio_cap": 1.1}],
    "preference loss sigmoid": [{"beta": 0.5, "label_smoothing": 0.1}],
}

Cases = dict[str, Any]


def number(*counters: int) -> float:
    """In [-1, 1), a pure function of integers (a linear congruential step for each, Knuth's multiplier)."""
    state = 1
    for counter in (*counters, 1, 2):
        state = (state * 6364136223846793005 + counter * 1442695040888963407 + 1) % 2**64
    return (state >> 11) / 2**52 - 1


def table(column: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """(rows, response) float64, shift + scale * [-1, 1)."""
    values = [[shift + scale * number(column, i, t) for t in range(WIDTH)] for i in range(ROWS)]
    return torch.tensor(values, dtype=torch.float64)


def vector(column: int, count: int = ROWS) -> Tensor:
    return torch.tensor([number(column, i) for i in range(count)], dtype=torch.float64)


OLD = table(1, 1.5, -2.2)
NEW = OLD + table(2, 0.5)
ROLLOUT = OLD + table(3, 0.3)
ADVANTAGES = table(4, 2.0)
OUTCOMES = torch.tensor([1.0, 0.5, 0.25, 0.0, 1.0, 1.0, -1.0], dtype=torch.float64)


def ours(registry: Registry[Any]) -> Iterator[str]:
    """The names of rlhub's own parts (a process may have registered others)."""
    for name in registry.names():
        target = registry.row(name).target
        if (target if isinstance(target, str) else target.__module__).startswith("rlhub."):
            yield name


def settings(registry: Registry[Any], name: str) -> Iterator[tuple[str, Any]]:
    """(name of the case, knobs): the defaults, then the variants."""
    knobs_class = registry.knobs_class(name)
    yield name, knobs_class() if knobs_class else None
    for changed in VARIANTS.get(f"{registry.kind} {name}", []):
        assert knobs_class is not None
        yield f"{name} {' '.join(f'{knob}={value}' for knob, value in changed.items())}", knobs_class(**changed)


def advantages() -> Cases:
    last = [max((t for t in range(WIDTH) if MASK[i, t]), default=0) for i in range(ROWS)]
    scores = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    scores[torch.arange(ROWS), last] = OUTCOMES * MASK.any(1)
    inputs = AdvantageInputs(
        token_level_rewards=scores,
        response_mask=MASK,
        group=GROUP,
        values=table(5, 0.8),
        old_log_probs=OLD,
        sum_pi_squared=table(6, 0.3, 0.5),
        baseline_rewards=vector(7),
        reward_components={"correct": OUTCOMES, "format": vector(8)},
    )
    cases: Cases = {}
    for name in ours(ADVANTAGE_ESTIMATORS):
        for case, knobs in settings(ADVANTAGE_ESTIMATORS, name):
            outputs = ADVANTAGE_ESTIMATORS.get(name)(inputs, knobs)
            cases |= {f"{case}: advantages": outputs.advantages, f"{case}: returns": outputs.returns}
    return cases


def policy_losses() -> Cases:
    """Loss, gradient of the losses' weighted sum, metrics, and the selection where a loss makes one."""
    cases: Cases = {}
    for name in ours(POLICY_LOSSES):
        for case, knobs in settings(POLICY_LOSSES, name):
            selected, select = None, POLICY_LOSSES.companion(name, "select")
            if select is not None:
                keys = table(9, 0.5, 0.5)
                selection = SelectionInputs(old_log_probs=OLD, advantages=ADVANTAGES, response_mask=MASK, keys=keys)
                selected = select(selection, knobs)
                cases[f"{case}: selected"] = selected
            log_probs = NEW.clone().requires_grad_()
            inputs = PolicyLossInputs(
                log_probs=log_probs,
                old_log_probs=OLD,
                advantages=ADVANTAGES,
                response_mask=MASK,
                weights=table(10, 0.5, 1.0),
                rollout_log_probs=ROLLOUT,
                selected=selected,
            )
            outputs = POLICY_LOSSES.get(name)(inputs, knobs)
            (gradient,) = torch.autograd.grad((outputs.loss * table(11, 0.5, 1.0)).sum(), log_probs)
            cases |= {f"{case}: loss": outputs.loss, f"{case}: gradient": gradient}
            cases |= {f"{case}: {metric}": value for metric, value in sorted(outputs.sums.items())}
    return cases


def kl() -> Cases:
    """Seven log-ratios from none to far beyond the bounds, then the controller and the penalty."""
    cases: Cases = {}
    distances = torch.tensor([0.0, 0.01, -0.01, 0.7, -0.7, 3.0, -3.0, 30.0, -30.0], dtype=torch.float64)
    for name in ours(KL_ESTIMATORS):
        log_probs = distances.clone().requires_grad_()
        value = KL_ESTIMATORS.get(name)(log_probs, torch.zeros_like(distances))
        (gradient,) = torch.autograd.grad(value.sum(), log_probs)
        cases |= {f"{name}: value": value, f"{name}: gradient": gradient}
    controller, coefficients = kl_control.AdaptiveKLController(0.1, 0.2, 1000), []
    for measured in (0.1, 0.19, 0.21, 5.0):
        controller.update(measured, 64)
        coefficients.append(controller.value)
    cases["adaptive coefficient"] = coefficients
    cases["penalized rewards"] = kl_control.penalized_rewards(table(12), table(13), MASK, 0.3)
    return cases


def values_and_means() -> Cases:
    """Aggregation, value loss, whitening and the mismatch metrics."""
    cases: Cases = {}
    counts = aggregation.Denominators(tokens=float(MASK.sum()), sequences=float(MASK.any(1).sum()), scale=7.0)
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"):
        cases[f"aggregate {mode}"] = aggregation.aggregate(table(14), MASK, mode, counts)
    predicted = table(15).requires_grad_()
    outputs = value_loss(predicted, table(16), table(17), MASK, 0.5)
    (gradient,) = torch.autograd.grad(outputs.loss.sum(), predicted)
    cases |= {"value loss": outputs.loss, "value loss: gradient": gradient}
    cases |= {f"value loss: {metric}": value for metric, value in sorted(outputs.sums.items())}
    cases["whiten"] = whiten(table(18, 3.0, 1.0), MASK)
    cases["whiten rewards"] = rewards.whiten_rewards(table(18, 3.0, 1.0), MASK)
    sums = {name: float(value) for name, value in mismatch.mismatch_sums(OLD, ROLLOUT, MASK).items()}
    return cases | dict(sorted(mismatch.mismatch_metrics(sums).items()))


def corrections() -> Cases:
    """Weights at both levels, truncated and in a band, every rejection rule, M2PO and A-3PO."""
    log_ratio, cases = masked(OLD - ROLLOUT, MASK), {}
    chosen: list[dict[str, Any]] = [
        {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": normalize}
        for level in ("token", "sequence")
        for threshold, normalize in ((1.1, False), ("0.8_1.2", False), (1.1, True))
    ]
    chosen += [{"rollout_rs": [rule], "rollout_rs_threshold": ["0.9_1.1"]} for rule in RATIO_RULES]
    chosen += [{"rollout_rs": [rule], "rollout_rs_threshold": ["0.02"]} for rule in DIVERGENCE_RULES]
    chosen.append({"m2po_threshold": 0.01})
    for changed in chosen:
        corrected = correct.correct(RolloutCorrectionConfig(**changed), log_ratio, MASK, ADVANTAGES)
        shown = (value[0] if isinstance(value, list) else value for value in changed.values())
        case = " ".join(f"{key}={value}" for key, value in zip(changed, shown, strict=True))
        cases[f"{case}: factors"] = correct.token_factors(corrected)
    cases["a3po"] = a3po.proximal_log_probs(NEW, ROLLOUT, torch.tensor([0, 1, 2, 3, 4, 8, 1]), MASK)
    return cases


def preferences() -> Cases:
    """Losses on pairs, and their gradient in the chosen answers."""
    cases: Cases = {}
    for name in ours(PREFERENCE_LOSSES):
        for case, knobs in settings(PREFERENCE_LOSSES, name):
            chosen = (5 * vector(19)).requires_grad_()
            others = {part: 5 * vector(20 + i) for i, part in enumerate(("rejected", "ref_chosen", "ref_rejected"))}
            loss = PREFERENCE_LOSSES.get(name)(PreferenceInputs(chosen=chosen, **others), knobs)
            (gradient,) = torch.autograd.grad(loss.sum(), chosen)
            cases |= {f"{case}: loss": loss, f"{case}: gradient": gradient}
    cases["bradley-terry"] = bradley_terry(vector(23), vector(24))
    cases["bradley-terry with margin"] = bradley_terry(vector(23), vector(24), vector(25).abs())
    return cases


FAMILIES: dict[str, Callable[[], Cases]] = {
    "advantages": advantages,
    "policy_losses": policy_losses,
    "kl": kl,
    "values_and_means": values_and_means,
    "corrections": corrections,
    "preferences": preferences,
}


def rounded(value: Any) -> Any:
    """Nested lists of floats with the digits that are recorded."""
    if isinstance(value, Tensor):
        value = value.detach().double().tolist()
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{float(value):.{DIGITS}g}") + 0.0  # no negative zero


def compute(family: str) -> Cases:
    return {case: rounded(value) for case, value in FAMILIES[family]().items()}


def text(cases: Cases) -> str:
    """JSON with one line a case."""
    lines = ",\n".join(f"{json.dumps(case)}: {json.dumps(value)}" for case, value in cases.items())
    return f'{{\n"version": {VERSION},\n"cases": {{\n{lines}\n}}\n}}\n'


def first_difference(old: Any, new: Any, place: str = "") -> str | None:
    """`[i][t]: was x, is y` of the first number that differs, None without one."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        found = (first_difference(a, b, f"{place}[{i}]") for i, (a, b) in enumerate(zip(old, new, strict=True)))
        return next(filter(None, found), None)
    same = not isinstance(old, list) and not isinstance(new, list) and math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=1e-12)
    return None if same else f"{place or 'value'}: was {old}, is {new}"


def changes(family: str, recorded: Cases, computed: Cases) -> list[str]:
    """A sentence for each case that changed, is new or is gone."""
    found = [f"{family}: {case!r} has no recorded value" for case in computed if case not in recorded]
    found += [f"{family}: {case!r} is recorded and no longer computed" for case in recorded if case not in computed]
    for case in computed.keys() & recorded.keys():
        difference = first_difference(recorded[case], computed[case])
        if difference:
            found.append(f"{family}: {case!r} {difference}")
    return sorted(found)


def compare(folder: Path | None = None) -> list[str]:
    """What changed since the record in `folder` (tests/golden) was made."""
    folder, found = folder or FOLDER, []
    for family in FAMILIES:
        path = folder / f"{family}.json"
        record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"version": VERSION, "cases": {}}
        if record["version"] != VERSION:
            found.append(f"{family}: recorded from inputs of version {record['version']}, which are now {VERSION}")
            continue
        found += changes(family, record["cases"], compute(family))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--update", action="store_true", help="record the values as they are now")
    if parser.parse_args().update:
        FOLDER.mkdir(exist_ok=True)
        for family in FAMILIES:
            (FOLDER / f"{family}.json").write_text(text(compute(family)))
        print(f"recorded {', '.join(FAMILIES)} in {FOLDER}")
        return 0
    found = compare()
    print("\n".join([*found, f"if this is meant: {COMMAND}"]) if found else "all values are as recorded")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
