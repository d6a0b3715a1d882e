"""One learning step with worker groups and a reward that only write down what they are asked."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhub.algorithms import estimation
from rlhub.algorithms.estimation import ColumnOutputs, own_group_when_invalid
from rlhub.algorithms.inputs import on_last_token
from rlhub.algorithms.kl import AdaptiveKLController, FixedKLController, build_kl_controller
from rlhub.algorithms.masked import masked
from rlhub.algorithms.statistics import Gather
from rlhub.config.sections.algorithm import KLControlConfig
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.errors import ConfigError, RegistryError, RewardError
from rlhub.protocol import DataProto
from rlhub.rewards.base import RewardResult
from rlhub.trainer.ppo import step as step_module
from rlhub.trainer.ppo.dealing import Dealing
from rlhub.trainer.ppo.requirements import num_mini_batches
from rlhub.trainer.ppo.scoring import Samples, build_scorer
from rlhub.trainer.ppo.step import TrainingStep
from rlhub.utils.timing import PhaseTimer
from tests.unit.algorithms import references

ROWS, PROMPT, RESPONSE = 8, 3, 5
TOKENS = {"input_ids", "attention_mask"}
MODEL = TOKENS | {"response_mask"}


@dataclass
class Call:
    name: str
    columns: dict[str, Tensor]
    arrays: set[str]
    meta: dict[str, Any]


class Sent:
    """A call under way, which notes when somebody waits for it."""

    def __init__(self, result: DataProto, waited: Callable[[], None]) -> None:
        self.result, self.waited = result, waited

    def get(self) -> DataProto:
        self.waited()
        return self.result


class remote:
    """A method of a fake worker group: called, or submitted and waited for."""

    def __init__(self, function: Callable[..., DataProto]) -> None:
        self.function = function

    def __get__(self, group: FakeGroup, owner: type) -> SimpleNamespace:
        def submit(batch: DataProto) -> Sent:
            name = f"{group.role}.{self.function.__name__}"
            return Sent(self.function(group, batch), lambda: group.waited.append((name, len(group.calls))))

        return SimpleNamespace(submit=submit)


@dataclass
class FakeGroup:
    """A worker group whose outputs are a function of the tokens, so that a row in the wrong place shows."""

    role: str
    calls: list[Call]
    dp_size: int = 1
    config: PPOConfig = field(default_factory=PPOConfig)
    metrics: dict[str, Any] = field(default_factory=dict)
    waited: list[tuple[str, int]] = field(default_factory=list)

    def mesh(self, name: str) -> Any:
        assert name == self.role
        return SimpleNamespace(dp_size=self.dp_size)

    def _note(self, method: str, batch: DataProto) -> dict[str, Tensor]:
        found = {name: column.clone() for name, column in batch.batch.items()}
        self.calls.append(Call(f"{self.role}.{method}", found, set(batch.non_tensor_batch), dict(batch.meta_info)))
        return found

    @remote
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        return log_probs_of(self, batch)

    @remote
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"ref_log_prob": token_value(self._note("compute_ref_log_prob", batch), -0.2)})

    @remote
    def compute_values(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"values": token_value(self._note("compute_values", batch), 0.01)})

    @remote
    def compute_advantages(self, batch: DataProto) -> DataProto:
        columns, meta = self._note("compute_advantages", batch), batch.meta_info
        settings = {"kl_coef": meta["kl_coef"], "version": meta["policy_version"]}
        masked_out = self.config.actor_rollout_ref.actor.mask_truncated
        outputs = estimation.compute_advantages(
            columns, gather_of(columns), self.config.algorithm, **settings, mask_truncated=masked_out
        )
        return answer(outputs)

    @remote
    def measure_batch(self, batch: DataProto) -> DataProto:
        columns, meta = self._note("measure_batch", batch), batch.meta_info
        settings = {"kl_coef": meta["kl_coef"], "version": meta["policy_version"]}
        return DataProto(
            meta_info={"metrics": estimation.measure_batch(columns, gather_of(columns), self.config.algorithm, **settings)}
        )

    @remote
    def rollout_correction(self, batch: DataProto) -> DataProto:
        columns, config = self._note("rollout_correction", batch), self.config.algorithm.rollout_correction
        return answer(estimation.rollout_correction(columns, gather_of(columns), config))

    @remote
    def select_tokens(self, batch: DataProto) -> DataProto:
        columns, actor = self._note("select_tokens", batch), self.config.actor_rollout_ref.actor
        step, seed = batch.meta_info["step"], self.config.trainer.seed
        return answer(estimation.select_tokens(columns, gather_of(columns), actor, seed=seed, step=step))

    @remote
    def update_actor(self, batch: DataProto) -> DataProto:
        self._note("update_actor", batch)
        return DataProto(meta_info={"metrics": self.metrics or {"actor/loss": [1.0, 3.0]}})

    @remote
    def update_critic(self, batch: DataProto) -> DataProto:
        self._note("update_critic", batch)
        return DataProto(meta_info={"metrics": {"critic/vf_loss": 4.0}})


def gather_of(columns: dict[str, Tensor]) -> Gather:
    return Gather.of(columns["sample_index"])


def answer(outputs: ColumnOutputs) -> DataProto:
    return DataProto.from_dict(tensors=outputs.columns, meta_info={"metrics": outputs.metrics})


def log_probs_of(group: FakeGroup, batch: DataProto) -> DataProto:
    return DataProto.from_dict(
        tensors={"old_log_probs": token_value(group._note("compute_log_prob", batch), -0.1)},
        meta_info={"metrics": {"perf/tflops/actor_infer": [1.0, 3.0]}},
    )


def token_value(columns: dict[str, Tensor], factor: float) -> Tensor:
    """factor * token under the mask of the call, 0 elsewhere."""
    (mask,) = [column for name, column in columns.items() if name.endswith("_mask") and name != "attention_mask"]
    return masked(factor * columns["input_ids"][:, PROMPT:].float(), mask)


@dataclass
class FakeReward:
    """Scores of the prompts in turn, by the row's number; invalid rows score 0.

    waited: the number of calls that were sent when the scores were waited for, of each batch.
    """

    calls: list[Call]
    scores: list[float]
    invalid: set[int]
    waited: list[int] = field(default_factory=list)

    def __call__(self, batch: DataProto) -> RewardResult:
        return self.start(batch)()

    def start(self, batch: DataProto) -> Callable[[], RewardResult]:
        self.calls.append(Call("reward", {}, set(), {}))
        rows = batch.batch["row"].tolist()

        def finish() -> RewardResult:
            self.waited.append(len(self.calls))
            return RewardResult(
                scores=torch.tensor([0.0 if row in self.invalid else self.scores[row] for row in rows]),
                valid=torch.tensor([row not in self.invalid for row in rows]),
                extra={},
                metrics={"reward/num_failed": float(len(self.invalid))},
            )

        return finish

    def close(self) -> None: ...


LENGTHS = [1, 5, 3, 2, 4, 5, 2, 3]
SCORES = [1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.2, 0.9]


def rollout_batch(samples: int = 2) -> DataProto:
    generator = torch.Generator().manual_seed(1)
    mask = (torch.arange(RESPONSE)[None] < torch.tensor(LENGTHS)[:, None]).long()
    tokens = torch.randint(1, 50, (ROWS, PROMPT + RESPONSE), generator=generator)
    return DataProto.from_dict(
        tensors={
            "row": torch.arange(ROWS),
            "uid": torch.arange(ROWS) // samples,
            "prompts": tokens[:, :PROMPT],
            "responses": tokens[:, PROMPT:],
            "input_ids": tokens,
            "attention_mask": torch.cat([torch.ones(ROWS, PROMPT).long(), mask], 1),
            "response_mask": mask,
            "response_length": torch.tensor(LENGTHS),
            "finish_reason": torch.tensor([0, 1, 0, 0, 2, 0, 0, 0]),
            "rollout_log_probs": masked(-0.1 * tokens[:, PROMPT:].float() - 0.05, mask),
        },
        non_tensors={"data_source": ["x"] * ROWS},
        meta_info={"temperature": 1.0},
    )


def config_of(
    estimator: str = "grpo", *, mini: int | None = None, kl_loss: bool = False, kl_reward: bool = False, samples: int = 2
) -> PPOConfig:
    """mini: prompts in an optimizer step; None: all of the batch."""
    config = PPOConfig(trainer=TrainerConfig(batches="driver"))  # the fake groups have no stores
    config.algorithm.adv_estimator, config.algorithm.use_kl_in_reward = estimator, kl_reward
    config.algorithm.kl_ctrl.kl_coef = 0.5
    config.data.train_batch_size = ROWS // samples
    config.actor_rollout_ref.rollout.n = samples
    config.actor_rollout_ref.actor.ppo_mini_batch_size = mini or ROWS // samples
    config.actor_rollout_ref.actor.use_kl_loss = kl_loss
    return config


@dataclass
class FakeSource:
    """A schedule that gives one batch after the other, and notes the calls between those of the workers.

    spoilt: generations of a step after which it asks for another one.  chooses: waits for the scores of each.
    """

    calls: list[Call]
    batches: Iterator[DataProto]
    spoilt: int = 0
    chooses: bool = False
    policy_version: int = 0
    metrics: dict[str, float] = field(default_factory=lambda: {"sampling/of_the_source": 1.0})

    def publish(self) -> None:
        self.calls.append(Call("publish", {}, set(), {}))

    def sample(self, prompts: Iterator[DataProto], step: int) -> Samples:
        self.calls.append(Call("sample", {}, set(), {}))
        return Samples(batch=next(self.batches))

    def select(self, samples: Samples) -> DataProto | None:
        self.spoilt -= 1
        if self.chooses or self.spoilt >= 0:
            samples.scored()
        return samples.batch if self.spoilt < 0 else None


@dataclass
class Run:
    train_step: TrainingStep
    calls: list[Call]
    batch: DataProto
    metrics: dict[str, float]

    def names(self) -> list[str]:
        return [call.name for call in self.calls]

    def sent(self, name: str) -> Call:
        (found,) = [call for call in self.calls if call.name == name]
        return found


def learn(config: PPOConfig, *, step: int = 1, dp_size: int = 1, invalid: set[int] | None = None) -> Run:
    calls: list[Call] = []
    actor = FakeGroup("actor", calls, dp_size)
    critic = FakeGroup("critic", calls) if config.algorithm.adv_estimator == "gae" else None
    batch = rollout_batch(config.actor_rollout_ref.rollout.n)
    train_step = step_of(config, calls, actor, critic, [batch], invalid)
    return Run(train_step, calls, batch, train_step(step, iter(())))


def step_of(
    config: PPOConfig,
    calls: list[Call],
    actor: FakeGroup,
    critic: FakeGroup | None,
    batches: Iterable[DataProto],
    invalid: set[int] | None = None,
    *,
    spoilt: int = 0,
) -> TrainingStep:
    """The step over fakes, which trains on the last of these batches after that many spoilt ones."""
    timers, actor.config = PhaseTimer(), config
    return TrainingStep(
        config=config,
        source=FakeSource(calls, iter(batches), spoilt),  # type: ignore[arg-type]
        score=build_scorer(config, FakeReward(calls, SCORES, invalid or set()), timers),
        actor=actor,  # type: ignore[arg-type]
        reference=actor,  # type: ignore[arg-type]
        critic=critic,  # type: ignore[arg-type]
        dealing=Dealing.between(config, actor, critic),  # type: ignore[arg-type]
        timers=timers,
    )


# Order of the calls


def test_calls_that_do_not_need_each_other_are_sent_before_one_is_waited_for() -> None:
    """On separate pools they then run at the same time.  waited: (call, number of calls sent until then)."""
    run = learn(config_of("gae", mini=1, kl_loss=True))
    actor, critic = run.train_step.actor, run.train_step.critic
    assert isinstance(actor, FakeGroup) and isinstance(critic, FakeGroup)
    num_passes, num_all = 6, 9  # with publication, sampling and the reward
    assert actor.waited == [
        ("actor.compute_log_prob", num_passes),
        ("actor.compute_ref_log_prob", num_passes),
        ("actor.compute_advantages", num_passes + 1),
        ("actor.update_actor", num_all),
    ]
    assert critic.waited == [("critic.compute_values", num_passes), ("critic.update_critic", num_all)]
    reward = run.train_step.score.reward
    assert isinstance(reward, FakeReward) and reward.waited == [num_passes]


def test_scores_that_a_source_chooses_by_are_waited_for_there() -> None:
    """Dynamic sampling compares groups; control: a source that takes what comes leaves the rewards to run beside the passes."""
    for chooses, expected in ((True, 3), (False, 4)):
        calls: list[Call] = []
        train_step = step_of(config_of(mini=1), calls, FakeGroup("actor", calls), None, [rollout_batch()])
        train_step.source.chooses = chooses  # type: ignore[attr-defined]
        train_step(1, iter(()))
        assert train_step.score.reward.waited == [expected]  # type: ignore[attr-defined]


START = ("publish", "sample", "reward")
ADVANTAGES = "actor.compute_advantages"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [*START, ADVANTAGES, "actor.update_actor"]),
        ({"mini": 2}, [*START, "actor.compute_log_prob", ADVANTAGES, "actor.update_actor"]),
        ({"kl_loss": True}, [*START, "actor.compute_ref_log_prob", ADVANTAGES, "actor.update_actor"]),
        ({"kl_reward": True}, [*START, "actor.compute_log_prob", "actor.compute_ref_log_prob", ADVANTAGES, "actor.update_actor"]),
        ({"estimator": "rloo"}, [*START, ADVANTAGES, "actor.update_actor"]),
        ({"estimator": "gae"}, [*START, "critic.compute_values", ADVANTAGES, "critic.update_critic", "actor.update_actor"]),
        (
            {"estimator": "gae", "mini": 1, "kl_loss": True},
            [
                *START,
                "actor.compute_log_prob",
                "actor.compute_ref_log_prob",
                "critic.compute_values",
                ADVANTAGES,
                "critic.update_critic",
                "actor.update_actor",
            ],
        ),
    ],
)
def test_only_the_passes_that_are_needed_in_the_papers_order(settings: dict[str, Any], expected: list[str]) -> None:
    assert learn(config_of(**settings)).names() == expected


def test_each_generation_is_scored_once_and_only_the_last_is_trained() -> None:
    """What dynamic sampling asks of the step: sample and score again until the source has its batch."""
    calls: list[Call] = []
    batches = [rollout_batch() for _ in range(3)]
    metrics = step_of(config_of(), calls, FakeGroup("actor", calls), None, batches, {6}, spoilt=2)(1, iter(()))
    assert [call.name for call in calls] == ["publish", *["sample", "reward"] * 3, ADVANTAGES, "actor.update_actor"]
    assert metrics["reward/num_failed"] == 3.0 and metrics["sampling/of_the_source"] == 1.0
    assert ["advantages" in batch.batch.keys() for batch in batches] == [False, False, True]


def test_metrics_of_a_pass_are_the_steps_and_stay_out_of_the_batch() -> None:
    run = learn(config_of(mini=1))
    assert run.metrics["perf/tflops/actor_infer"] == 2.0 and "metrics" not in run.batch.meta_info
    assert "perf/tflops/actor_infer" not in learn(config_of()).metrics


def test_while_the_critic_warms_up_the_policy_stays() -> None:
    config = config_of("gae")
    config.trainer.critic_warmup = 2
    assert [learn(config, step=step).names()[-1] for step in (1, 2, 3)] == ["critic.update_critic"] * 2 + ["actor.update_actor"]


# What is sent


ONE_NUMBER = {"sample_index", "uid", "valid", "scores", "finish_reason", "response_length"}
OF_ADVANTAGES: dict[str, Callable[[TrainingStep], bool]] = {
    "values": lambda step: step.critic is not None,
    "old_log_probs": lambda step: step.needs.old_log_probs,
    "rollout_log_probs": lambda step: step.needs.old_log_probs,
    "ref_log_prob": lambda step: step.needs.reference,
}


def check_sent(run: Run, policy: set[str]) -> None:
    """Forward passes get the model's inputs, advantages and updates what they read, and nothing else travels."""
    config = run.train_step.config
    read = {name for name, wanted in OF_ADVANTAGES.items() if wanted(run.train_step)}
    expected = {
        ADVANTAGES: {"attention_mask", "response_mask", *ONE_NUMBER} | read,
        "actor.update_actor": TOKENS | {"learn_mask", "mini_batch", "advantages"} | policy,
        "critic.update_critic": TOKENS | {"learn_mask", "mini_batch", "values", "returns"},
    }
    for call in run.calls[len(START) :]:
        assert set(call.columns) == expected.get(call.name, MODEL), call.name
        updates = {"num_mini_batches": num_mini_batches(config)} if call.name in expected else {}
        assert call.meta == ({"kl_coef": 0.5, "policy_version": None} if call.name == ADVANTAGES else updates)
        assert not call.arrays


SENT: list[tuple[dict[str, Any], set[str]]] = [
    ({}, {"rollout_log_probs"}),
    ({"mini": 2}, {"old_log_probs"}),
    ({"kl_loss": True}, {"rollout_log_probs", "ref_log_prob"}),
    ({"estimator": "gae", "mini": 1, "kl_loss": True}, {"old_log_probs", "ref_log_prob"}),
]


@pytest.mark.parametrize(("settings", "policy"), SENT)
def test_only_the_columns_that_are_read_are_sent(settings: dict[str, Any], policy: set[str]) -> None:
    check_sent(learn(config_of(**settings)), policy)


@pytest.mark.parametrize(("settings", "policy"), SENT)
def test_sending_the_whole_batch_is_caught(settings: dict[str, Any], policy: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(batch: DataProto, names: tuple[str, ...], **meta: object) -> DataProto:
        everything = batch.select(meta_info_keys=[])
        everything.meta_info.update(meta)
        return everything

    monkeypatch.setattr(step_module, "view", whole)
    with pytest.raises(AssertionError):
        check_sent(learn(config_of(**settings)), policy)


def test_rows_stay_together_when_they_are_dealt_to_ranks() -> None:
    """Longest first over two ranks changes the order; each row keeps its tokens, score, values and log-probs."""
    config = config_of("gae", mini=2, kl_loss=True)
    config.trainer.balance_batch = True
    run = learn(config, dp_size=2)
    order = run.batch.batch["row"]
    assert order.tolist() != list(range(ROWS)) and sorted(order.tolist()) == list(range(ROWS))
    assert torch.equal(run.batch.batch["input_ids"], rollout_batch().batch["input_ids"][order])
    assert run.batch.batch["scores"].tolist() == pytest.approx([SCORES[row] for row in order.tolist()])
    sent = run.sent("actor.update_actor").columns
    torch.testing.assert_close(sent["old_log_probs"], token_value(sent, -0.1))
    torch.testing.assert_close(sent["ref_log_prob"], token_value(sent, -0.2))
    torch.testing.assert_close(run.sent("critic.update_critic").columns["values"], token_value(sent, 0.01))


# Advantages


def grpo_by_row(scores: dict[int, float], uid: list[int]) -> dict[int, float]:
    rows = list(scores)
    return dict(zip(rows, references.grpo([scores[row] for row in rows], [uid[row] for row in rows], True), strict=True))


def check_advantages(run: Run, invalid: set[int]) -> None:
    """Valid rows as if the invalid ones had never been drawn, invalid ones without advantage."""
    uid = rollout_batch(run.train_step.config.actor_rollout_ref.rollout.n).batch["uid"].tolist()
    expected = grpo_by_row({row: SCORES[row] for row in range(ROWS) if row not in invalid}, uid)
    got = run.sent("actor.update_actor").columns["advantages"]
    for row in range(ROWS):
        assert got[row, 0].item() == pytest.approx(expected.get(row, 0.0), abs=1e-5), row


def test_advantages_are_the_estimators() -> None:
    check_advantages(learn(config_of()), set())


def test_rows_without_a_valid_reward_move_nobodys_baseline_and_do_not_train() -> None:
    """Groups of four: a missing sample leaves a spread."""
    run = learn(config_of(samples=4), invalid={1, 6})
    check_advantages(run, {1, 6})
    mask = run.sent("actor.update_actor").columns["learn_mask"]
    assert mask.sum(1).tolist() == [0 if row in (1, 6) else LENGTHS[row] for row in range(ROWS)]
    assert run.metrics["actor/masked_samples"] == 2.0


def test_leaving_invalid_rows_in_their_group_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimation, "own_group_when_invalid", lambda uid, valid, sample_index: uid)
    with pytest.raises(AssertionError):
        check_advantages(learn(config_of(samples=4), invalid={1, 6}), {1, 6})


def test_a_response_of_which_the_model_wrote_nothing_moves_nobodys_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a score and no token for it: as 0 in its group it would pass for a bad answer."""
    whole = rollout_batch()

    def without_a_token() -> DataProto:
        whole.batch["response_mask"][2] = 0
        return whole

    monkeypatch.setattr(f"{__name__}.rollout_batch", lambda samples: without_a_token())
    run = learn(config_of())
    columns = run.batch.batch
    place = {row: index for index, row in enumerate(columns["row"].tolist())}
    trained = columns["learn_mask"].any(1)
    assert not trained[place[2]] and trained.sum() == ROWS - 1
    assert not columns["advantages"][place[3]].any(), "it is alone in its group now"
    assert run.metrics["reward/mean"] == pytest.approx((sum(SCORES) - SCORES[2]) / (ROWS - 1))


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gae"])
def test_scores_near_the_largest_have_finite_metrics_or_an_error_that_names_the_row(
    estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3e38 is a float32.  Sums of such are not; what an estimator cannot hold in float32 is no update worth taking."""
    huge = [3e38, -3e38, 3e38, 3e38, 3e38, 0.0, 3e38, 0.0]
    monkeypatch.setattr(f"{__name__}.SCORES", huge)
    if estimator == "grpo":
        metrics = learn(config_of(estimator)).metrics
        assert metrics["reward/mean"] == pytest.approx(sum(huge) / ROWS, rel=1e-6)
        assert all(map(math.isfinite, metrics.values())), metrics
    elif estimator == "rloo":
        with pytest.raises(RewardError, match=r"row \d+: .*3e\+38.*not finite.*Scale the rewards down"):
            learn(config_of(estimator))
    else:
        with pytest.raises(RewardError, match=r"not finite"):
            learn(config_of(estimator))


def test_invalid_rows_get_ids_that_no_prompt_has() -> None:
    uid, valid = torch.tensor([0, 0, 1, 1]), torch.tensor([True, False, False, True])
    groups = own_group_when_invalid(uid, valid, torch.tensor([4, 7, 5, 6])).tolist()
    assert (groups[0], groups[3]) == (0, 1)
    assert len(set(groups)) == 4


def test_forward_passes_and_the_critic_see_every_token_but_only_valid_rows_train() -> None:
    run = learn(config_of("gae", mini=2), invalid={3})
    for name in ("actor.compute_log_prob", "critic.compute_values"):
        assert run.sent(name).columns["response_mask"].sum(1).tolist() == LENGTHS
    for name, mask in (("critic.update_critic", "learn_mask"), ("actor.update_actor", "learn_mask")):
        assert run.sent(name).columns[mask].sum(1).tolist() == [0 if row == 3 else length for row, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("masked_out", [False, True])
def test_truncated_rows_are_left_out_of_the_loss_if_asked_but_not_of_the_baseline(masked_out: bool) -> None:
    """Rows 1 (length) and 4 (aborted) did not stop by themselves."""
    config = config_of()
    config.actor_rollout_ref.actor.mask_truncated = masked_out
    run = learn(config)
    check_advantages(run, set())
    lengths = run.sent("actor.update_actor").columns["learn_mask"].sum(1).tolist()
    assert lengths == [0 if masked_out and row in (1, 4) else LENGTHS[row] for row in range(ROWS)]
    assert run.metrics["actor/masked_samples"] == (2.0 if masked_out else 0.0)


# KL in the reward


def rewards_of(run: Run) -> Tensor:
    """What the estimator was given, from what the step sent."""
    call = run.sent(ADVANTAGES)
    scored = masked(call.columns["response_mask"], call.columns["valid"][:, None])
    algorithm, gather = run.train_step.config.algorithm, gather_of(call.columns)
    return estimation.token_rewards(call.columns, scored, gather, algorithm, call.meta["kl_coef"])[0]


def test_the_reward_loses_beta_times_the_kl_of_old_and_reference() -> None:
    run = learn(config_of(kl_reward=True))
    tokens, mask = rollout_batch().batch["input_ids"][:, PROMPT:].tolist(), rollout_batch().batch["response_mask"].tolist()
    kl = [[0.1 * token if m else 0.0 for token, m in zip(*row, strict=True)] for row in zip(tokens, mask, strict=True)]
    expected = [[-0.5 * value for value in row] for row in kl]
    for row, length in enumerate(LENGTHS):
        expected[row][length - 1] += SCORES[row]
    torch.testing.assert_close(rewards_of(run), torch.tensor(expected))
    assert torch.equal(run.batch.batch["scores"], torch.tensor(SCORES)) and "token_level_scores" not in run.batch.batch.keys()
    per_row = [references.mean(references.inside([row], [m])) for row, m in zip(kl, mask, strict=True)]
    assert run.metrics["actor/reward_kl_penalty"] == pytest.approx(references.mean(per_row), rel=1e-5)
    assert run.metrics["actor/reward_kl_penalty_coeff"] == 0.5
    outcome = [sum(row) for row in expected]
    advantages = references.grpo(outcome, [row // 2 for row in range(ROWS)], True)
    assert run.batch.batch["advantages"][:, 0].tolist() == pytest.approx(advantages, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("whitened", [True, False])
def test_rewards_are_whitened_after_the_kl_over_the_tokens_that_train(whitened: bool) -> None:
    """Row 6 has no valid score: neither its tokens nor their KL move the spread."""
    config = config_of(kl_reward=True)
    config.algorithm.whiten_rewards = whitened
    got = rewards_of(learn(config, invalid={6}))
    plain = rewards_of(learn(config_of(kl_reward=True), invalid={6}))
    mask = [[0] * RESPONSE if row == 6 else keep for row, keep in enumerate(rollout_batch().batch["response_mask"].tolist())]
    kept = references.inside(plain.tolist(), mask)
    centre, spread = references.mean(kept), (references.variance(kept) + 1e-8) ** 0.5
    expected = [
        [(x - centre) / spread + centre if m else 0.0 for x, m in zip(row, keep, strict=True)]
        for row, keep in zip(plain.tolist(), mask, strict=True)
    ]
    torch.testing.assert_close(got, torch.tensor(expected) if whitened else plain)
    assert not torch.allclose(got, plain) or not whitened


def test_without_it_rewards_are_the_scores_and_no_coefficient_is_told() -> None:
    run = learn(config_of(kl_loss=True))
    assert torch.equal(rewards_of(run), on_last_token(torch.tensor(SCORES), rollout_batch().batch["response_mask"]))
    assert not any("reward_kl" in name for name in run.metrics)


def test_an_adaptive_coefficient_moves_once_a_step_by_the_number_of_samples() -> None:
    config = config_of(kl_reward=True)
    config.algorithm.kl_ctrl = KLControlConfig(type="adaptive", kl_coef=0.5, target_kl=0.1, horizon=100)
    run = learn(config)
    assert run.metrics["actor/reward_kl_penalty"] > 0.12  # far above the target: the error is clipped
    assert run.train_step.kl_controller.value == pytest.approx(0.5 * (1 + 0.2 * ROWS / 100))
    assert run.metrics["actor/reward_kl_penalty_coeff"] == 0.5  # the one that was used


def test_controllers_by_their_setting() -> None:
    assert isinstance(build_kl_controller(KLControlConfig(type="fixed", kl_coef=0.3)), FixedKLController)
    adaptive = build_kl_controller(KLControlConfig(type="adaptive", kl_coef=0.3, target_kl=2.0, horizon=7))
    assert isinstance(adaptive, AdaptiveKLController)
    assert (adaptive.value, adaptive.target, adaptive.horizon) == (0.3, 2.0, 7)


# Metrics and settings


def test_mismatch_is_measured_where_the_old_log_probs_are() -> None:
    """The rollout's log-probs are 0.05 below the trainer's on every token."""
    assert learn(config_of(mini=2)).metrics["mismatch/kl"] == pytest.approx(-0.05, abs=1e-5)
    assert [name for name in learn(config_of()).metrics if name.startswith("mismatch")] == ["mismatch/masked_share"]


def test_metrics_come_from_the_reward_the_batch_the_estimator_and_both_updates() -> None:
    run = learn(config_of("gae"))
    assert (run.metrics["actor/loss"], run.metrics["critic/vf_loss"]) == (2.0, 4.0)
    assert run.metrics["reward/num_failed"] == 0.0
    assert run.metrics["critic/score/mean"] == pytest.approx(references.mean(SCORES))
    assert run.metrics["response_length/clip_ratio"] == 1 / ROWS
    assert learn(config_of()).metrics["groups/all_equal"] == 0.25
    assert "timing_s/reward" in run.train_step.timers.drain()


def test_the_estimators_knobs_come_from_the_settings() -> None:
    config = config_of()
    config.algorithm.norm_adv_by_std_in_grpo = False
    plain = learn(config).batch.batch["advantages"][0, 0].item()
    assert plain == pytest.approx(0.5)
    config.algorithm.adv_kwargs = {"norm_adv_by_std_in_grpo": True}
    assert learn(config).batch.batch["advantages"][0, 0].item() == pytest.approx(0.5 / 0.5**0.5, abs=1e-4)
    config.algorithm.adv_kwargs = {"norm": True}
    with pytest.raises(ConfigError, match=r"algorithm\.adv_kwargs\.norm: no such knob"):
        learn(config)


def test_an_unknown_estimator_is_an_error_before_anything_is_called() -> None:
    with pytest.raises(RegistryError, match="did you mean 'rloo'"):
        learn(config_of("rlo"))


# How it reads


def called_in(function: ast.AST) -> list[str]:
    """The names of what a function calls, in the order of its lines; `x.submit(...)` counts as x."""
    calls = sorted(
        (node for node in ast.walk(function) if isinstance(node, ast.Call)), key=lambda call: (call.lineno, -call.col_offset)
    )
    names = [ast.unparse(call.func).removesuffix(".submit").rpartition(".")[2] for call in calls]
    return list(dict.fromkeys(names))


SHOWN = (
    "publish", "sample_and_score", "compute_log_prob", "compute_ref_log_prob", "compute_values", "compute_advantages",
    "update_critic", "update_actor",
)  # fmt: skip


def test_the_step_shows_its_calls_in_the_papers_order_on_one_screen() -> None:
    """And nothing else of the folder makes one of the workers' calls, or publishes outside of a validation."""
    folder = Path(step_module.__file__).parent
    tree = ast.parse((folder / "step.py").read_text())
    (text,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingStep"]
    (step,) = [node for node in ast.walk(text) if isinstance(node, ast.FunctionDef) and node.name == "__call__"]
    assert [name for name in called_in(step) if name in SHOWN] == list(SHOWN)
    assert (step.end_lineno or 0) - step.lineno < 60
    elsewhere = {path.name: set(called_in(ast.parse(path.read_text()))) for path in folder.glob("*.py") if path.name != "step.py"}
    for name in SHOWN[2:]:
        assert not [file for file, names in elsewhere.items() if name in names], name
    # sources and the loop's validation: what they call `publish` is their own part of it
    assert {file for file, names in elsewhere.items() if "publish" in names} == {
        "trainer.py",
        "graph_step.py",
        "stream_source.py",
        "offline_source.py",
    }
