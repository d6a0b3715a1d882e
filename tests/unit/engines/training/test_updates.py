"""Updates of policy and critic on a bigram model: global denominators, mini-batches, extra loss terms and metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import pytest
import torch
from torch import Tensor

from rlhub.algorithms.inputs import PolicyLossOutputs
from rlhub.config.sections.actor import ActorConfig, PolicyLossConfig
from rlhub.config.sections.ppo import CriticConfig
from rlhub.engines.training import updates
from rlhub.engines.training.base import ForwardOutputs, LossFunction, Rows, StepReport, TrainEngine
from rlhub.engines.training.updates import PolicyUpdater, ValueUpdater, sft_loss, take_steps
from rlhub.errors import ConfigError, RegistryError
from rlhub.protocol.weights.pieces import Piece
from tests.unit.algorithms import references

VOCABULARY, PROMPT, RESPONSE, ROWS = 7, 2, 4, 6
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"]
MASK = [[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]]


class FakeTrainEngine(TrainEngine):
    """A bigram table in float64 with plain gradient descent, one rank of a run.

    elsewhere: the rows that the other ranks hold in each step (for `reduce`); skip: steps to report as not finite.
    Records each step's rows and its gradient.
    """

    def __init__(
        self, *, micro_rows: int = ROWS, elsewhere: Iterable[Tensor] = (), skip: Iterable[int] = (), lr: float = 0.1
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
        self.worth = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
        self.parameters = [self.table, self.worth]
        self.dp_rank, self.dp_size, self.device = 0, 1, torch.device("cpu")
        self.micro_rows, self.elsewhere, self.skip, self.lr = micro_rows, list(elsewhere), set(skip), lr
        self.steps: list[dict[str, Tensor]] = []
        self.gradients: list[list[Tensor]] = []
        self.read: set[str] = set()

    def forward(self, rows: Rows) -> ForwardOutputs:
        """Live values outside the mask too, where a real engine leaves zeros: no loss may read them or send a gradient there."""
        tokens = rows["input_ids"]
        before, response = tokens[:, PROMPT - 1 : -1], tokens[:, PROMPT:]
        spread = self.table[before].log_softmax(-1)
        log_probs = spread.gather(-1, response[..., None])[..., 0]
        entropy = -(spread.exp() * spread).sum(-1)
        return ForwardOutputs(log_probs=log_probs, entropy=entropy, values=self.worth[before])

    def forward_backward(self, rows: Rows, loss_fn: LossFunction, *, outputs: Iterable[str] = ("log_probs",)) -> dict[str, float]:
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.steps.append(dict(rows))
        totals: dict[str, float] = {"loss": 0.0}
        wanted = set(outputs)
        for start in range(0, max(len(rows["input_ids"]), 1), self.micro_rows):
            micro = Watched({name: column[start : start + self.micro_rows] for name, column in rows.items()}, self.read)
            passed = self.forward(micro)
            given = {f.name: getattr(passed, f.name) for f in dataclasses.fields(passed) if f.name in wanted}
            result = loss_fn(ForwardOutputs(**given), micro)
            result.loss.backward()
            for name, value in {"loss": result.loss, **result.sums}.items():
                totals[name] = totals.get(name, 0.0) + float(value.detach())
        return totals

    def gather(self, rows: Tensor) -> Tensor:
        raise NotImplementedError

    def optimizer_step(self) -> StepReport:
        self.gradients.append([parameter.grad.clone() for parameter in self.parameters])
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in self.gradients[-1]))
        if len(self.gradients) - 1 in self.skip:
            return StepReport(grad_norm=math.nan, lr=self.lr, skipped=True)
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters, self.gradients[-1], strict=True):
                parameter -= self.lr * gradient
        return StepReport(grad_norm=norm, lr=self.lr, skipped=False)

    def reduce(self, values: Tensor, op: str = "sum", *, every_rank: bool = False) -> Tensor:
        assert every_rank is (op == "max"), "extremes are seen where a pipeline ends, sums are told to every rank"
        if op == "max":  # of the mismatch's extremes; what the other ranks have is not told here
            return values.clone()
        assert op == "sum"
        if not self.elsewhere:
            return values.clone()
        mask = self.elsewhere[len(self.steps)]
        return values + torch.stack([mask.sum(), mask.any(1).sum()]).double()

    def initialize(self) -> None:
        raise NotImplementedError

    def infer(self, rows: Rows, *, outputs: Iterable[str], adapters: bool = True) -> dict[str, Tensor]:
        with torch.no_grad():
            passed = self.forward(rows)
        return {name: getattr(passed, name) for name in outputs}

    def named_weights(self, *, bucket_bytes: int = 256 << 20) -> Iterator[list[tuple[str, Tensor]]]:
        raise NotImplementedError

    def state_shards(self) -> Iterator[Piece]:
        raise NotImplementedError

    def load_state(self, read: Callable[[Piece], Tensor]) -> None:
        raise NotImplementedError

    def scalar_state(self) -> dict[str, int | float]:
        raise NotImplementedError

    def load_scalar_state(self, state: Mapping[str, int | float]) -> None:
        raise NotImplementedError

    def onload(self) -> None:
        raise NotImplementedError

    def offload(self) -> None:
        raise NotImplementedError


class Watched(dict[str, Tensor]):
    """Columns that note which of them were read."""

    def __init__(self, columns: Mapping[str, Tensor], read: set[str]) -> None:
        super().__init__(columns)
        self.read = read

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return super().__getitem__(name)


def batch(*names: str, seed: int = 0) -> dict[str, Tensor]:
    """The named columns next to input_ids and response_mask; floats are NaN outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor(MASK)
    rows = {
        "input_ids": torch.randint(0, VOCABULARY, (ROWS, PROMPT + RESPONSE), generator=generator),
        "attention_mask": torch.ones(ROWS, PROMPT + RESPONSE, dtype=torch.int64),
        "response_mask": mask,
    }
    for name in ("advantages", "old_log_probs", "ref_log_prob", "rollout_log_probs", "values", "returns"):
        values = torch.randn(ROWS, RESPONSE, generator=generator, dtype=torch.float64)
        if name.endswith(("log_probs", "log_prob")):
            values = -values.abs() - 1
        if name in names:
            rows[name] = torch.where(mask.bool(), values, torch.full_like(values, math.nan))
    rows["mini_batch"] = torch.tensor([0, 1, 1, 0, 2, 0])
    return rows


def actor(**settings: object) -> ActorConfig:
    return ActorConfig(**settings)  # type: ignore[arg-type]


def policy_update(
    rows: dict[str, Tensor], engine: FakeTrainEngine | None = None, num_mini_batches: int = 1, **settings: object
) -> tuple[FakeTrainEngine, dict[str, float]]:
    engine = engine or FakeTrainEngine()
    metrics = PolicyUpdater(engine, actor(**settings), scale=float(RESPONSE)).update(rows, num_mini_batches)
    return engine, metrics


def part(rows: Mapping[str, Tensor], indices: list[int]) -> dict[str, Tensor]:
    return {name: column[indices] for name, column in rows.items()}


# Values


def ppo_token(new: float, old: float, advantage: float, low: float, high: float, c: float) -> tuple[float, bool, bool]:
    """Loss of one token, whether the ratio clip binds, whether the dual clip binds."""
    ratio = math.exp(max(-20.0, min(20.0, new - old)))
    clipped = min(max(ratio, 1 - low), 1 + high)
    objective = min(advantage * ratio, advantage * clipped)
    dual = advantage < 0 and objective < c * advantage
    return -(max(objective, c * advantage) if advantage < 0 else objective), advantage * clipped < advantage * ratio, dual


@pytest.mark.parametrize("mode", MODES)
def test_the_whole_loss_is_policy_less_entropy_plus_kl(mode: str) -> None:
    rows = batch("advantages", "old_log_probs", "ref_log_prob")
    before = FakeTrainEngine().infer(rows, outputs=("log_probs", "entropy"))
    new, entropy = before["log_probs"].tolist(), before["entropy"].tolist()
    old, ref, advantages = (rows[name].tolist() for name in ("old_log_probs", "ref_log_prob", "advantages"))
    policy = [[0.0] * RESPONSE for _ in range(ROWS)]
    kl = [[0.0] * RESPONSE for _ in range(ROWS)]
    clipped = dual = 0
    for i, t in ((i, t) for i in range(ROWS) for t in range(RESPONSE) if MASK[i][t]):
        policy[i][t], binds, lower = ppo_token(new[i][t], old[i][t], advantages[i][t], 0.2, 0.28, 3.0)
        kl[i][t] = references.kl("k3", new[i][t], ref[i][t])
        clipped, dual = clipped + binds, dual + lower
    parts = [references.aggregate(table, MASK, mode, float(RESPONSE)) for table in (policy, entropy, kl)]

    _, metrics = policy_update(
        rows,
        loss_agg_mode=mode,
        entropy_coeff=0.3,
        use_kl_loss=True,
        kl_loss_coef=0.7,
        kl_loss_type="low_var_kl",
        clip_ratio_high=0.28,
    )
    tokens = sum(map(sum, MASK))
    assert metrics["actor/loss"] == pytest.approx(parts[0] - 0.3 * parts[1] + 0.7 * parts[2], rel=1e-10)
    assert metrics["actor/pg_loss"] == pytest.approx(parts[0], rel=1e-10)
    assert metrics["actor/entropy"] == pytest.approx(references.mean(references.inside(entropy, MASK)), rel=1e-10)
    assert metrics["actor/kl_loss"] == pytest.approx(references.mean(references.inside(kl, MASK)), rel=1e-10)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(clipped / tokens) and clipped
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(dual / tokens)
    assert (metrics["actor/optimizer_steps"], metrics["actor/skipped_steps"], metrics["actor/lr"]) == (1.0, 0.0, 0.1)


# The law of aggregation


def cut_and_ranks(mode: str) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The gradient of one step: on one rank at once, in single rows, and summed over two ranks with rows of their own."""
    rows = batch("advantages", "old_log_probs", "ref_log_prob")
    settings = {"loss_agg_mode": mode, "entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.5}
    whole, _ = policy_update(rows, **settings)
    single, _ = policy_update(rows, FakeTrainEngine(micro_rows=1), **settings)
    ranks = []
    for here, there in (([0, 2, 5], [1, 3, 4]), ([1, 3, 4], [0, 2, 5])):
        engine = FakeTrainEngine(micro_rows=2, elsewhere=[rows["response_mask"][there]])
        ranks.append(policy_update(part(rows, here), engine, **settings)[0].gradients[0])
    summed = [one + other for one, other in zip(*ranks, strict=True)]
    return whole.gradients[0], single.gradients[0], summed


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_does_not_depend_on_micro_batches_or_ranks(mode: str) -> None:
    whole, single, ranks = cut_and_ranks(mode)
    assert whole[0].abs().max() > 1e-3
    torch.testing.assert_close(single, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(ranks, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", MODES[:-1])
def test_counting_only_the_own_rows_is_caught(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = updates.count_denominators

    def own_rows(engine: FakeTrainEngine, mask: Tensor, scale: float) -> updates.Denominators:
        engine.elsewhere = []
        return real(engine, mask, scale)

    monkeypatch.setattr(updates, "count_denominators", own_rows)
    whole, _, ranks = cut_and_ranks(mode)
    assert (ranks[0] - whole[0]).abs().max() > 1e-3


# Mini-batches


def test_each_step_has_the_rows_of_its_mini_batch_in_every_epoch() -> None:
    rows = batch("advantages", "old_log_probs")
    engine, metrics = policy_update(rows, num_mini_batches=3, ppo_epochs=2)
    expected = [rows["input_ids"][rows["mini_batch"] == index] for index in range(3)] * 2
    assert [torch.equal(step["input_ids"], ids) for step, ids in zip(engine.steps, expected, strict=True)] == [True] * 6
    assert metrics["actor/optimizer_steps"] == 6


def test_a_rank_without_rows_of_a_mini_batch_still_takes_its_steps() -> None:
    rows = part(batch("advantages", "old_log_probs"), [0, 3, 5])
    others = batch()["response_mask"][[1, 2, 4]]
    engine, metrics = policy_update(rows, FakeTrainEngine(elsewhere=[others[:0], others[:2], others[2:]]), num_mini_batches=3)
    assert [len(step["input_ids"]) for step in engine.steps] == [3, 0, 0]
    assert [bool(step[0].any()) for step in engine.gradients] == [True, False, False]
    assert math.isfinite(metrics["actor/loss"])


def test_a_batch_ends_with_the_step_that_finds_the_policy_too_far() -> None:
    """Measured step by step: without the limit each step takes its share of the mean, from which its own follows."""
    rows, epochs = batch("advantages"), 8
    rows["old_log_probs"] = (
        FakeTrainEngine().infer(rows, outputs=("log_probs",))["log_probs"].masked_fill(rows["response_mask"] == 0, math.nan)
    )
    means = [0.0] + [policy_update(rows, ppo_epochs=n)[1]["actor/ppo_kl"] for n in range(1, epochs + 1)]
    each = [n * means[n] - (n - 1) * means[n - 1] for n in range(1, epochs + 1)]
    limit = (each[3] + each[4]) / 2
    assert each == sorted(each) and each[4] > limit > each[3] > 0
    engine, metrics = policy_update(rows, ppo_epochs=epochs, target_kl=limit)
    assert len(engine.steps) == metrics["actor/optimizer_steps"] == 5, "the step that finds it is taken"
    assert metrics["actor/ppo_kl"] == pytest.approx(means[5])
    assert len(policy_update(rows, ppo_epochs=epochs)[0].steps) == epochs
    assert len(policy_update(rows, ppo_epochs=epochs, target_kl=1e9)[0].steps) == epochs


def test_a_loss_that_measures_no_kl_cannot_end_a_batch() -> None:
    updater = PolicyUpdater(FakeTrainEngine(), actor(target_kl=0.1), scale=float(RESPONSE))
    updater.loss = lambda inputs, knobs: PolicyLossOutputs(loss=-inputs.log_probs * inputs.response_mask, sums={})
    with pytest.raises(ConfigError, match="does not report"):
        updater.update(batch("advantages", "old_log_probs"), 1)


def test_denominators_are_those_of_the_step_not_of_the_batch() -> None:
    rows = batch("advantages", "old_log_probs")
    _, metrics = policy_update(rows, FakeTrainEngine(lr=0.0), num_mini_batches=3)
    alone = [
        policy_update(part(rows, (rows["mini_batch"] == index).nonzero().squeeze(1).tolist()))[1]["actor/loss"]
        for index in range(3)
    ]
    assert metrics["actor/loss"] == pytest.approx(references.mean(alone), rel=1e-10)
    assert metrics["actor/loss"] != pytest.approx(policy_update(rows)[1]["actor/loss"], rel=1e-3)


def test_a_step_without_tokens_is_not_taken() -> None:
    rows = batch("advantages", "old_log_probs", "ref_log_prob")
    rows["response_mask"] = rows["response_mask"] * 0
    engine, metrics = policy_update(rows, use_kl_loss=True, entropy_coeff=0.1)
    assert engine.gradients == []
    assert metrics == {"actor/skipped_steps": 0.0, "actor/optimizer_steps": 0.0}


# Skipped steps


def test_skipped_steps_are_counted_and_left_out_of_the_means() -> None:
    rows = batch("advantages", "old_log_probs")
    _, metrics = policy_update(rows, FakeTrainEngine(skip=[1], lr=0.0), num_mini_batches=3)
    kept = [part(rows, [0, 3, 5]), part(rows, [4])]
    losses = [policy_update(step)[1] for step in kept]
    assert (metrics["actor/skipped_steps"], metrics["actor/optimizer_steps"]) == (1.0, 2.0)
    assert metrics["actor/loss"] == pytest.approx(references.mean([one["actor/loss"] for one in losses]))
    assert metrics["actor/grad_norm"] == pytest.approx(references.mean([one["actor/grad_norm"] for one in losses]))


def test_when_every_step_is_skipped_only_that_is_told() -> None:
    _, metrics = policy_update(batch("advantages", "old_log_probs"), FakeTrainEngine(skip=range(3)), num_mini_batches=3)
    assert metrics == {"actor/skipped_steps": 3.0, "actor/optimizer_steps": 0.0, "actor/lr": 0.1}
    _, metrics = value_update(batch("values", "returns"), FakeTrainEngine(skip=range(3)), num_mini_batches=3)
    assert metrics == {"critic/skipped_steps": 3.0, "critic/optimizer_steps": 0.0, "critic/lr": 0.1}


# Old log-probs


def with_and_without_old(num_mini_batches: int) -> tuple[list[Tensor], list[Tensor]]:
    """The last step's gradients with log-probs of the starting policy given, and with none."""
    absent = batch("advantages")
    present = absent | {"old_log_probs": FakeTrainEngine().infer(absent, outputs=("log_probs",))["log_probs"]}
    engines = [policy_update(rows, FakeTrainEngine(lr=2.0), num_mini_batches)[0] for rows in (present, absent)]
    return engines[0].gradients[-1], engines[1].gradients[-1]


def test_absent_old_log_probs_are_those_of_the_first_step() -> None:
    present, absent = with_and_without_old(1)
    torch.testing.assert_close(absent, present, rtol=0, atol=1e-14)


def test_in_later_steps_they_are_not() -> None:
    present, absent = with_and_without_old(3)
    assert (present[0] - absent[0]).abs().max() > 1e-3


# Extra terms


def without_advantage(**settings: object) -> tuple[FakeTrainEngine, dict[str, Tensor]]:
    rows = batch("advantages", "ref_log_prob")
    rows["advantages"] = rows["advantages"] * 0
    own = FakeTrainEngine().infer(rows, outputs=("log_probs",))["log_probs"]
    rows["ref_log_prob"] = torch.where(rows["response_mask"].bool(), own - 0.5, torch.full_like(own, math.nan))
    return policy_update(rows, **settings)[0], rows


def test_the_entropy_bonus_raises_entropy_and_a_zero_coefficient_does_nothing() -> None:
    engine, rows = without_advantage(entropy_coeff=0.5)
    mask = rows["response_mask"].bool()
    before = FakeTrainEngine().infer(rows, outputs=("entropy",))["entropy"][mask].mean()
    assert engine.infer(rows, outputs=("entropy",))["entropy"][mask].mean() > before
    still, _ = without_advantage()
    assert torch.equal(still.table, FakeTrainEngine().table)


@pytest.mark.parametrize(("reported", "coefficient"), [(True, 0.0), (False, 0.0), (False, 0.1)])
def test_the_engine_computes_an_entropy_where_loss_or_metrics_read_it(reported: bool, coefficient: float) -> None:
    asked: list[set[str]] = []

    class Asked(FakeTrainEngine):
        def forward_backward(
            self, rows: Rows, loss_fn: LossFunction, *, outputs: Iterable[str] = ("log_probs",)
        ) -> dict[str, float]:
            asked.append(set(outputs))
            return super().forward_backward(rows, loss_fn, outputs=outputs)

    settings = {"calculate_entropy": reported, "entropy_coeff": coefficient}
    _, metrics = policy_update(batch("advantages", "old_log_probs"), Asked(), **settings)
    assert ("entropy" in asked[0]) == ("actor/entropy" in metrics) == bool(reported or coefficient)


@pytest.mark.parametrize("kind", ["low_var_kl", "mse", "abs", "k1+", "k3+"])
def test_the_kl_loss_pulls_towards_the_reference(kind: str) -> None:
    """The policy is everywhere 0.5 nats above the reference on the sampled tokens: their probability must fall."""
    engine, rows = without_advantage(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind)
    mask = rows["response_mask"].bool()
    before, after = (e.infer(rows, outputs=("log_probs",))["log_probs"][mask].mean() for e in (FakeTrainEngine(), engine))
    assert after < before
    assert bool(engine.table.isfinite().all())


def test_a_kl_loss_that_is_off_or_has_no_weight_leaves_the_policy_alone() -> None:
    for settings in ({"use_kl_loss": False, "kl_loss_coef": 1.0}, {"use_kl_loss": True, "kl_loss_coef": 0.0}):
        engine, _ = without_advantage(**settings)
        assert torch.equal(engine.table, FakeTrainEngine().table)


# Mismatch


def test_mismatch_is_measured_here_only_when_nobody_measured_it_before() -> None:
    rows = batch("advantages", "rollout_log_probs")
    _, metrics = policy_update(rows)
    own = FakeTrainEngine().infer(rows, outputs=("log_probs",))["log_probs"]
    difference = references.inside((rows["rollout_log_probs"] - own).tolist(), MASK)
    assert metrics["mismatch/kl"] == pytest.approx(references.mean(difference), rel=1e-10)
    assert not any("mismatch_" in name for name in metrics)
    for without in (batch("advantages"), batch("advantages", "rollout_log_probs", "old_log_probs")):
        assert not any("mismatch" in name for name in policy_update(without)[1])


# What is read


def test_columns_read_are_those_that_are_told() -> None:
    everything = batch("advantages", "old_log_probs", "ref_log_prob", "rollout_log_probs", "values", "returns")
    inputs = {"input_ids", "response_mask"}
    engine, _ = policy_update(everything, use_kl_loss=True)
    assert engine.read == inputs | {"advantages", "old_log_probs", "ref_log_prob"}
    del everything["old_log_probs"]
    engine, _ = policy_update(everything)
    assert engine.read == inputs | {"advantages", "rollout_log_probs"}
    engine, _ = value_update(everything)
    assert engine.read == inputs | {"values", "returns"}


# Critic and supervised fine-tuning


def value_update(
    rows: dict[str, Tensor], engine: FakeTrainEngine | None = None, num_mini_batches: int = 1, mode: str = "token-mean"
) -> tuple[FakeTrainEngine, dict[str, float]]:
    engine = engine or FakeTrainEngine()
    config = CriticConfig(ppo_epochs=1, cliprange_value=0.5)
    metrics = ValueUpdater(engine, config, loss_agg_mode=mode, scale=float(RESPONSE)).update(rows, num_mini_batches)
    return engine, metrics


@pytest.mark.parametrize("mode", MODES)
def test_value_loss_and_its_metrics(mode: str) -> None:
    rows = batch("values", "returns")
    values = FakeTrainEngine().infer(rows, outputs=("values",))["values"].tolist()
    old, returns = rows["values"].tolist(), rows["returns"].tolist()
    loss = [[0.0] * RESPONSE for _ in range(ROWS)]
    clipped, errors = 0, []
    for i, t in ((i, t) for i in range(ROWS) for t in range(RESPONSE) if MASK[i][t]):
        loss[i][t], binds = references.value_token(values[i][t], old[i][t], returns[i][t], 0.5)
        clipped, errors = clipped + binds, [*errors, (values[i][t] - returns[i][t]) ** 2]
    _, metrics = value_update(rows, mode=mode)
    targets = references.inside(returns, MASK)
    spread = references.variance(targets) * (len(targets) - 1) / len(targets)
    assert metrics["critic/vf_loss"] == pytest.approx(references.aggregate(loss, MASK, mode, float(RESPONSE)), rel=1e-10)
    assert metrics["critic/vf_clipfrac"] == pytest.approx(clipped / len(errors)) and clipped
    assert metrics["critic/vpred_mean"] == pytest.approx(references.mean(references.inside(values, MASK)))
    assert metrics["critic/vf_explained_var"] == pytest.approx(1 - references.mean(errors) / spread)


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_without_anything_to_explain() -> None:
    rows = batch("values", "returns")
    own = FakeTrainEngine().infer(rows, outputs=("values",))["values"]
    assert value_update(rows | {"values": own, "returns": own})[1]["critic/vf_explained_var"] == pytest.approx(1.0)
    constant = torch.full_like(own, 0.1).float()
    assert value_update(rows | {"returns": constant})[1]["critic/vf_explained_var"] == 0.0


def test_the_critic_learns_and_its_gradient_does_not_depend_on_the_cut() -> None:
    rows = batch("values", "returns")
    whole, first = value_update(rows)
    single, _ = value_update(rows, FakeTrainEngine(micro_rows=1))
    torch.testing.assert_close(single.gradients, whole.gradients, rtol=0, atol=1e-12)
    _, second = value_update(rows, whole)
    assert second["critic/vf_loss"] < first["critic/vf_loss"]


def test_supervised_loss_is_the_mean_negative_log_likelihood_of_response_tokens() -> None:
    rows = batch()
    log_probs = FakeTrainEngine().infer(rows, outputs=("log_probs",))["log_probs"].tolist()
    engine = FakeTrainEngine(micro_rows=1)
    (step,) = take_steps(engine, rows, sft_loss, num_mini_batches=1, epochs=1, scale=1.0, outputs=("log_probs",))
    assert step.sums["loss"] == pytest.approx(-references.mean(references.inside(log_probs, MASK)), rel=1e-10)
    assert step.denominators.tokens == sum(map(sum, MASK))
    assert step.denominators.sequences == sum(map(any, MASK))


# Settings


def test_knobs_reach_the_loss_and_unknown_names_are_errors() -> None:
    rows = batch("advantages", "old_log_probs")
    tight = policy_update(rows, clip_ratio=0.0)[1]["actor/loss"]
    assert tight != pytest.approx(policy_update(rows)[1]["actor/loss"])
    as_knob = policy_update(rows, policy_loss=PolicyLossConfig(kwargs={"clip_ratio": 0.0}))[1]["actor/loss"]
    assert as_knob == pytest.approx(tight)
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.actor\.policy_loss\.kwargs\.clip_ration: no such knob"):
        policy_update(rows, policy_loss=PolicyLossConfig(kwargs={"clip_ration": 0.1}))
    with pytest.raises(RegistryError, match="did you mean 'vanilla'"):
        policy_update(rows, policy_loss=PolicyLossConfig(loss_mode="vanila"))
