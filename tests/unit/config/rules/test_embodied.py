"""Rules of training in simulators (section `env`)."""

from __future__ import annotations

import pytest

from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS
from rlhub.config.rules import checks
from rlhub.config.rules import embodied as rules
from rlhub.config.sections.ppo import PPOConfig
from tests.unit.config.rules.test_derive import good

MODEL, ROLLOUT, ACTOR = "actor_rollout_ref__model__", "actor_rollout_ref__rollout__", "actor_rollout_ref__actor__"
VLA = {"chunk": 2, "action_dim": 2, "bins": 5, "first_bin_id": 11, "image_token_id": 3, "tokens_per_image": 4, "place_ids": [10]}
SOUND = {
    "env__name": "reach_color",
    "data__train_files": None,
    "data__val_files": None,
    "trainer__test_freq": -1,
    f"{MODEL}vla": {**VLA, "value_head": True},
    f"{ROLLOUT}name": "hf",
    f"{ACTOR}value_loss_coef": 0.5,
    f"{ACTOR}ppo_mini_batch_size": 2,
    "algorithm__adv_estimator": "chunk_gae",
}
TEXT = {"env__name": None, "data__train_files": "train.parquet"}


def embodied(**values: object) -> PPOConfig:
    return good(**(SOUND | values))


def requirement_problems(config: PPOConfig) -> list[str]:
    requires = ADVANTAGE_ESTIMATORS.row(config.algorithm.adv_estimator).requires
    return [*checks.check_requirements(config, requires), *rules.requirement_problems(config, requires)]


def test_a_sound_configuration_starts() -> None:
    config = embodied(data__train_batch_size=8, trainer__n_gpus_per_node=2)
    assert checks.check(config) == [] == requirement_problems(config)
    assert checks.check_required(config, ("data.train_files",)) == []


@pytest.mark.parametrize(
    ("values", "num_envs"),
    [
        ({"data__train_batch_size": 8, f"{ROLLOUT}n": 3}, 24),
        ({"data__train_batch_size": 8, f"{ROLLOUT}n": 3, "trainer__n_gpus_per_node": 2}, 12),
        ({"data__train_batch_size": 4, "env__stages": 6}, 6),
        ({"data__train_batch_size": 4, "env__num_envs": 2}, 2),
    ],
)
def test_a_rank_has_an_environment_for_each_of_its_episodes(values: dict[str, object], num_envs: int) -> None:
    assert embodied(**values).env.num_envs == num_envs
    assert good().env.num_envs is None


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({f"{MODEL}vla": {}}, ("needs a policy of actions", "set actor_rollout_ref.model.vla")),
        ({"data__train_files": "x.parquet"}, ("reads no prompts", "leave data.train_files", "env.name=null")),
        ({"data__val_files": "x.parquet"}, ("reads no prompts",)),
        ({"custom_reward_function__path": "mine.py"}, ("gives the rewards itself", "custom_reward_function")),
        ({"reward_model__judge__model__path": "judge"}, ("gives the rewards itself", "no judge")),
        ({"trainer__record_batches": True}, ("records no batches", "trainer.record_batches=false")),
        ({"trainer__replay_from": "x"}, ("records no batches", "trainer.replay_from=null")),
        ({"env__val_scenes": 1, "trainer__n_gpus_per_node": 2}, ("env.val_scenes=1", "2 ranks", "set 0 or at least 2")),
        ({"env__stages": 3, "env__num_envs": 2}, ("env.stages=3", "env.num_envs=2")),
        ({"env__reward": "srpo"}, ("each has one and comes once", "rollout.n above 1", "env.scenes=fixed")),
        ({"env__reward": "srpo", f"{ROLLOUT}n": 2, "env__srpo__encoder": "vjepa2"}, ("V-JEPA 2", "set env.srpo.path")),
    ],
)
def test_what_cannot_start(values: dict[str, object], parts: tuple[str, ...]) -> None:
    problems = [problem for problem in checks.check(embodied(**values)) if problem.startswith("env.name=reach_color: ")]
    assert len(problems) == 1 and all(part in problems[0] for part in parts), problems


@pytest.mark.parametrize("values", [{f"{ROLLOUT}n": 2}, {"env__scenes": "fixed"}, {"env__srpo__task": "instruction"}])
def test_failures_are_compared_where_successes_may_come(values: dict[str, object]) -> None:
    assert checks.check(embodied(env__reward="srpo", **values)) == []


def test_filtered_groups_cannot_start() -> None:
    problems = checks.check(embodied(algorithm__filter_groups__enable=True, **{f"{ROLLOUT}n": 2}))
    assert any(
        one == "env.name=reach_color: does not filter groups: leave out algorithm.filter_groups.enable=true" for one in problems
    )


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"algorithm__adv_estimator": "gae"}, ("adv_estimator=gae", "one call of an episode", "chunk_gae or chunk_grpo")),
        ({f"{MODEL}vla": VLA}, ("needs values", "model.vla.value_head=true")),
        ({f"{ACTOR}value_loss_coef": 0.0}, ("needs values", "actor.value_loss_coef above 0")),
        ({"algorithm__rollout_correction__bypass_mode": True}, ("bypass_mode=false",)),
        ({"algorithm__adv_estimator": "chunk_grpo", f"{ACTOR}value_loss_coef": 0.0}, ("chunk_grpo", "needs 2 or more")),
        ({"algorithm__adv_estimator": "chunk_grpo", f"{ROLLOUT}n": 2}, ("value_loss_coef=0.5", "only chunk_gae", "set it to 0")),
        (TEXT | {"algorithm__adv_estimator": "gae"}, ("value_loss_coef=0.5", "own values", "set it to 0")),
        (TEXT | {f"{ACTOR}value_loss_coef": 0.0}, ("adv_estimator=chunk_gae needs the episodes of simulators: set env.name",)),
    ],
)
def test_what_the_estimator_needs(values: dict[str, object], parts: tuple[str, ...]) -> None:
    problems = requirement_problems(embodied(**values))
    assert len(problems) == 1 and all(part in problems[0] for part in parts), problems
