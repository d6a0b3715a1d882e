"""Which passes a run needs follows from its settings and its estimator's registry row."""

from __future__ import annotations

import itertools

import pytest

from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS
from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import RegistryError
from rlhub.registry import Row
from rlhub.trainer.ppo.requirements import check_group_metric, num_mini_batches, requirements


def config_of(
    estimator: str = "grpo", *, prompts: int = 8, mini: int = 8, epochs: int = 1, kl_loss: bool = False, kl_reward: bool = False
) -> PPOConfig:
    config = PPOConfig()
    config.algorithm.adv_estimator = estimator
    config.algorithm.use_kl_in_reward = kl_reward
    config.data.train_batch_size = prompts
    actor = config.actor_rollout_ref.actor
    actor.ppo_mini_batch_size, actor.ppo_epochs, actor.use_kl_loss = mini, epochs, kl_loss
    return config


@pytest.mark.parametrize(("estimator", "values", "groups"), [("gae", True, False), ("grpo", False, True), ("rloo", False, True)])
def test_values_and_groups_come_from_the_estimators_row(estimator: str, values: bool, groups: bool) -> None:
    needs = requirements(config_of(estimator))
    assert (needs.values, needs.groups) == (values, groups)


@pytest.mark.parametrize(("kl_loss", "kl_reward"), itertools.product([False, True], repeat=2))
def test_the_reference_is_needed_by_either_use_of_the_kl(kl_loss: bool, kl_reward: bool) -> None:
    assert requirements(config_of(kl_loss=kl_loss, kl_reward=kl_reward)).reference == (kl_loss or kl_reward)


@pytest.mark.parametrize(("mini", "epochs", "kl_reward"), itertools.product([8, 4], [1, 2], [False, True]))
def test_old_log_probs_have_no_pass_only_when_one_step_is_taken_and_nobody_else_reads_them(
    mini: int, epochs: int, kl_reward: bool
) -> None:
    needs = requirements(config_of(mini=mini, epochs=epochs, kl_reward=kl_reward))
    assert needs.old_log_probs == ((mini, epochs, kl_reward) != (8, 1, False))


def test_a_kl_loss_reads_the_current_policy_and_needs_no_old_log_probs() -> None:
    assert not requirements(config_of(kl_loss=True)).old_log_probs


@pytest.mark.parametrize(("mode", "staleness", "wanted"), [("async", 1, True), ("async", 0, False), ("sync", 1, False)])
def test_old_samples_are_compared_with_the_current_policy_and_not_with_the_one_that_wrote_them(
    mode: str, staleness: int, wanted: bool
) -> None:
    config = config_of()
    config.actor_rollout_ref.rollout.mode, config.trainer.max_staleness = mode, staleness  # type: ignore[assignment]
    assert requirements(config).old_log_probs == wanted
    config.algorithm.rollout_correction.bypass_mode = True
    assert not requirements(config).old_log_probs


def test_an_estimator_of_ones_own_may_ask_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(name="mine", target="nowhere:mine", requires=frozenset({"old_log_probs", "values"}))
    monkeypatch.setitem(ADVANTAGE_ESTIMATORS._rows, "mine", row)
    needs = requirements(config_of("mine"))
    assert needs.old_log_probs and needs.values and not needs.groups


def test_an_unknown_estimator_is_an_error() -> None:
    with pytest.raises(RegistryError, match="no advantage estimator 'grp'; did you mean 'grpo'"):
        requirements(config_of("grp"))


def test_number_of_mini_batches() -> None:
    assert [num_mini_batches(config_of(prompts=12, mini=mini)) for mini in (12, 6, 4, 1)] == [1, 2, 3, 12]


def test_a_group_metric_that_no_scorer_gives_is_found_before_start() -> None:
    config = config_of()
    groups = config.algorithm.filter_groups
    groups.metric = "acuracy"
    assert check_group_metric(config) == []  # nobody compares
    groups.enable = True
    (problem,) = check_group_metric(config)
    assert problem.startswith("algorithm.filter_groups.metric=acuracy: ") and "custom_reward_function.path" in problem
    for metric in ("seq_reward", "score", "acc", "overlong"):
        groups.metric = metric
        assert check_group_metric(config) == []
    groups.metric = "bonus"
    for section, name, value in ((config.custom_reward_function, "path", "score.py"), (config.trainer, "plugins", ["mine"])):
        assert check_group_metric(config), "the control"
        before = getattr(section, name)
        setattr(section, name, value)
        assert check_group_metric(config) == [], "may be the user's own number"
        setattr(section, name, before)
