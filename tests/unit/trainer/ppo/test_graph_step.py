"""A step as a graph does what the plain step does, and lets a user's functions take the place of nodes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhub.agents.remote.trajectory_store import WIDE
from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import PolicyMismatchError, ProtocolError
from rlhub.pipeline.builtin import dapo, ppo
from rlhub.pipeline.graph import Pipeline, TaskGraph
from rlhub.protocol import BatchRef, DataProto
from rlhub.protocol.layout import Layout
from rlhub.trainer.ppo.graph_step import GraphStep, StepCalls
from rlhub.trainer.ppo.metrics import MismatchBound
from rlhub.trainer.ppo.plan import step_graph
from rlhub.trainer.ppo.requirements import requirements
from rlhub.trainer.ppo.step import REWARD, StepParts
from rlhub.utils.timing import NODE_TIME
from tests.unit.trainer.ppo.test_step import ROWS, Call, FakeGroup, config_of, rollout_batch, step_of

CLOCK = ("timing_per_token_ms/", NODE_TIME)


def samples(config: PPOConfig) -> DataProto:
    batch = rollout_batch(config.actor_rollout_ref.rollout.n)
    batch.batch["ordinal"] = batch.batch["uid"] + 100
    return batch


def steps_of(
    config: PPOConfig, batches: list[DataProto], graph: TaskGraph | None, spoilt: int = 0
) -> tuple[StepParts, list[Call]]:
    """A step over fakes, as a graph where one is given, and the calls that it makes."""
    calls: list[Call] = []
    critic = FakeGroup("critic", calls) if config.algorithm.adv_estimator == "gae" else None
    plain = step_of(config, calls, FakeGroup("actor", calls, dp_size=2), critic, batches, {1}, spoilt=spoilt)
    if graph is None:
        return plain, calls
    names = ("config", "source", "score", "actor", "reference", "critic", "dealing", "timers")
    return GraphStep(**{name: getattr(plain, name) for name in names}, graph=graph, roles={}), calls


def take(
    config: PPOConfig, graph: TaskGraph | None, step: int = 1, batches: int = 1, **fields: Any
) -> tuple[dict[str, float], list[Call]]:
    train_step, calls = steps_of(config, [samples(config) for _ in range(batches)], graph, **fields)
    return train_step(step, iter(())), calls


def sent(calls: list[Call]) -> dict[str, list[tuple[dict[str, list[Any]], dict[str, Any]]]]:
    """What each method was sent: columns and parameters.  The graph has prompt_length where the plain step counts the mask's."""
    found: dict[str, list[tuple[dict[str, list[Any]], dict[str, Any]]]] = {}
    for call in calls:
        columns = {name: column.tolist() for name, column in sorted(call.columns.items())}
        if call.name.endswith("compute_advantages") and columns.pop("attention_mask", None) is None:
            del columns["prompt_length"]
        found.setdefault(call.name, []).append((columns, call.meta))
    return found


def graph_of(config: PPOConfig, function: Any = ppo) -> TaskGraph:
    return function(config, requirements(config)).build(config)


CONFIGS = {
    "grpo": config_of(),
    "several steps, KL loss": config_of(mini=1, kl_loss=True),
    "critic": config_of("gae", mini=2),
    "KL in the reward": config_of("reinforce_plus_plus", kl_reward=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_graph_makes_the_calls_of_the_plain_step(name: str) -> None:
    plain, plain_calls = take(CONFIGS[name], None)
    metrics, calls = take(CONFIGS[name], graph_of(CONFIGS[name]))
    assert sent(calls) == sent(plain_calls)
    assert {name: value for name, value in metrics.items() if not name.startswith(CLOCK)} == {
        name: value for name, value in plain.items() if not name.startswith(CLOCK)
    }
    assert {name.removeprefix(NODE_TIME) for name in metrics if name.startswith(NODE_TIME)} >= {"sample", "score", "update_actor"}


def test_the_graph_keeps_every_column_of_finished_episodes() -> None:
    """A column that sample does not declare would be lost: the ranks keep the tokens of episodes under these names."""
    sample = graph_of(config_of()).node("sample")
    estimated = {use.name for use in graph_of(config_of()).node("compute_advantages").reads}
    assert set(WIDE) <= {use.name for use in sample.writes}
    assert {"given_rewards", "added_rewards"} <= estimated & set(REWARD)


def test_a_difference_of_the_columns_is_noticed() -> None:
    """Control of the test above: a graph without the pass before the update."""
    config = config_of(mini=1)
    less = ppo(config, requirements(config)).remove("compute_log_prob").build(config)
    assert sent(take(config, less)[1]) != sent(take(config, None)[1])


def test_dynamic_sampling_asks_again() -> None:
    config = config_of()
    for function in (ppo, dapo):
        metrics, calls = take(config, graph_of(config, function), batches=3, spoilt=2)
        assert [call.name for call in calls].count("sample") == 3 and "actor/loss" in metrics
        assert sent(calls) == sent(take(config, None, batches=3, spoilt=2)[1])


def test_the_policy_waits_for_its_critic() -> None:
    config = config_of("gae")
    config.trainer.critic_warmup = 1
    names = [call.name for call in take(config, graph_of(config))[1]]
    assert "critic.update_critic" in names and "actor.update_actor" not in names
    assert "actor.update_actor" in [call.name for call in take(config, graph_of(config), step=2)[1]]


def test_rows_that_bring_their_scores_keep_them() -> None:
    config = config_of()
    batch = samples(config)
    batch.batch["scores"], batch.batch["valid"] = torch.arange(ROWS) / 8, torch.ones(ROWS, dtype=torch.bool)
    batch.batch["token_level_scores"] = torch.rand(batch.batch["response_mask"].shape) * batch.batch["response_mask"]
    found: list[Tensor] = []
    for graph in (None, graph_of(config)):
        train_step, calls = steps_of(config, [batch.select()], graph)
        train_step(1, iter(()))
        assert "reward" not in [call.name for call in calls]
        (call,) = [call for call in calls if call.name == "actor.compute_advantages"]
        found.append(torch.cat([call.columns["scores"][:, None], call.columns["token_level_scores"]], 1))
    assert torch.equal(found[0], found[1])


def test_the_mismatch_is_checked_before_the_update() -> None:
    config = config_of(mini=1)
    train_step, calls = steps_of(config, [samples(config)], graph_of(config))
    train_step.mismatch = MismatchBound(warn=-2.0, stop=-1.0)
    with pytest.raises(PolicyMismatchError, match="node 'compute_advantages' of pipeline 'ppo'"):
        train_step(1, iter(()))
    assert "actor.update_actor" not in [call.name for call in calls]


def test_functions_of_the_users_own_take_the_place_of_nodes() -> None:
    config = config_of(kl_loss=False)
    metrics, calls = take(config, brevity_of(config))
    assert [call.name for call in calls] == ["publish", "sample", "reward", "actor.measure_batch", "actor.update_actor"]
    update = calls[-1].columns
    mean = metrics["critic/shaped/mean"]
    assert mean > 0 and update["advantages"].abs().sum() > 0 and not update["advantages"][~update["learn_mask"].bool()].any()


def brevity_of(config: PPOConfig) -> TaskGraph:
    config.trainer.pipeline = f"{Path(__file__).parents[4] / 'recipes' / 'pipelines' / 'brevity.py'}:pipeline"
    graph = step_graph(config)
    assert graph is not None
    return graph


def test_advantages_of_the_users_own_are_measured_too() -> None:
    """The metrics are those of the plain step, but the estimator's own; the mismatch is checked before the update."""
    config, own = config_of(mini=1), config_of(mini=1)
    plain, found = take(config, None)[0], take(own, brevity_of(own))[0]
    others = ("critic/advantages/", "critic/returns/", "groups/", *CLOCK)
    expected = {name: value for name, value in plain.items() if not name.startswith(others)}
    assert {"reward/mean", "response_length/mean", "critic/rewards/mean", "mismatch/kl"} <= expected.keys()
    assert {name: found[name] for name in expected} == expected
    train_step, calls = steps_of(own, [samples(own)], brevity_of(own))
    train_step.mismatch = MismatchBound(warn=-2.0, stop=-1.0)
    with pytest.raises(PolicyMismatchError, match="node 'measure' of pipeline 'ppo'"):
        train_step(1, iter(()))
    assert "actor.update_actor" not in [call.name for call in calls]


def test_a_function_may_end_after_the_rows_have_moved() -> None:
    """It started before: its columns stay here, and are put into the new order with those that it got."""
    asked: list[BatchRef] = []
    actor = SimpleNamespace(add_columns=lambda ref: asked.append(ref) or ref)
    calls: Any = StepCalls(SimpleNamespace(actor=actor), iter(()))  # type: ignore[arg-type]
    small = DataProto.from_dict({"scores": torch.arange(2.0), "brevity": torch.ones(2)})
    node = brevity_of(config_of()).node("shape")
    before = calls.start(node, BatchRef(("samples-0",), small, {}, Layout.of(0, np.arange(2))))
    calls.dealt = ("samples-0+1",)  # now the rows have moved
    after = calls.start(node, BatchRef(("samples-0+1",), small, {}, Layout.of(0, np.arange(2))))
    late = before()
    assert isinstance(late, DataProto) and late.batch["shaped"].tolist() == pytest.approx([0.1, 1.1]) and asked == []
    assert after().keys == ("samples-0+1",) and len(asked) == 1


def mistaken(batch: DataProto) -> DataProto:
    return batch.select()


def test_a_function_may_return_only_what_it_declares() -> None:
    config = config_of()
    step: Pipeline = ppo(config, requirements(config))
    step.insert("odd", below="score", run=f"{__name__}:mistaken", reads="scores", writes="style:float32(rows)")
    step.insert("log", below="odd", run=f"{__name__}:mistaken", reads="style")
    with pytest.raises(ProtocolError, match="node 'odd' of pipeline 'ppo'"):
        take(config, step.build(config))
