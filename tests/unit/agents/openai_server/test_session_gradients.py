"""The gradient of an episode of several conversations is that of its turns, each trained by itself, token by token."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhub.agents.openai_server import sessions
from rlhub.agents.openai_server.sessions import Session, SessionLimits, SessionTurn, as_trajectory
from rlhub.agents.trajectory import Episode, Sampled
from rlhub.algorithms.estimation import compute_advantages
from rlhub.algorithms.statistics import HERE
from rlhub.config.sections.algorithm import AlgorithmConfig
from rlhub.engines.rollout.base import Completion
from rlhub.rollout_service.executor.batches import to_batch
from rlhub.rollout_service.executor.episode_groups import Group, PromptItem
from rlhub.trainer.ppo.step import number_samples
from tests.support.tiny_models import VOCABULARY, tiny_model

GROUP = 3
TOLERANCE = 1e-5


def forest(draw: random.Random) -> Session:
    """What an agent may leave: conversations that branch, go on and begin anew, of roles that train and of one that does not."""
    session = Session(
        name="a",
        seed=0,
        limits=SessionLimits(prompt=99, response=99),
        engine=None,  # type: ignore[arg-type]
        roles={"solver": "trained", "judge": "frozen"},
    )
    for number in range(draw.randint(1, 7)):
        parent = draw.choice([None, *session.turns])
        role = draw.choice(["", "", "solver", "judge"]) if parent is None else parent.role
        length = 0 if number and draw.random() < 0.1 else draw.randint(1, 4)
        completion = Completion(
            token_ids=tokens(draw, length),
            log_probs=[-draw.uniform(0.1, 3.0) for _ in range(length)],  # of each token its own, so that none can be swapped
            finish_reason="stop",
            versions=[0] * length,
        )
        turn = SessionTurn(parent=parent, added=tokens(draw, draw.randint(1, 4)), completion=completion)
        session.record([turn], role, f"{number}")
    if not any(turn.role != "judge" and turn.completion.token_ids for turn in session.turns):
        return forest(draw)
    return session


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(3, VOCABULARY) for _ in range(count)]


def log_probs_of(model: Any, ids: Tensor, attended: Tensor) -> Tensor:
    """(rows, tokens - 1): of each token but the first, given those before it."""
    places = (attended.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=attended, position_ids=places, use_cache=False).logits
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def gradient(model: Any, loss: Tensor) -> Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])


def of_turns(model: Any, group: list[tuple[Session, float]]) -> Tensor:
    """Each turn by itself; group statistics with loops.  A token's weight is its own recorded log-prob."""
    rewards = [reward for _, reward in group]
    mean = sum(rewards) / len(rewards)
    std = (sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)) ** 0.5
    loss = torch.zeros(())
    for session, reward in group:
        advantage = 0.0 if len(set(rewards)) == 1 else (reward - mean) / (std + 1e-6)
        for turn in session.turns:
            written = turn.completion.token_ids
            if turn.role != "judge" and written:
                ids = torch.tensor([turn.ids])
                found = log_probs_of(model, ids, torch.ones_like(ids))[0, -len(written) :]
                loss = loss + (advantage * torch.tensor(turn.completion.log_probs) * found).sum()
    return gradient(model, loss)


def of_rows(model: Any, group: list[tuple[Session, float]], result: Callable[[Session], Sampled | None]) -> Tensor:
    """The rows that train, as one batch with its advantages."""
    samples = [result(session) for session, _ in group]
    for sample, (_, reward) in zip(samples, group, strict=True):
        assert sample is not None
        sample.set_reward(reward)
    item = PromptItem(prompt_ids=(1,), ordinal=0, row={})
    batch = to_batch([Group(item=item, trajectories=[sample for sample in samples if sample is not None])], pad_id=0)
    number_samples(batch)
    columns = dict(batch.batch.items())
    made = compute_advantages(columns, HERE, AlgorithmConfig(adv_estimator="grpo"), kl_coef=0.0, version=0)
    width = columns["responses"].shape[1]
    found = log_probs_of(model, columns["input_ids"], columns["attention_mask"])[:, -width:]
    weights = made.columns["advantages"] * columns["rollout_log_probs"] * made.columns["learn_mask"]
    return gradient(model, (weights * found).sum())


def drawn(seed: int) -> list[tuple[Session, float]]:
    draw = random.Random(seed)
    return [(forest(draw), draw.choice([0.0, 0.5, 1.0])) for _ in range(GROUP)]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def far(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-3)).item()


def test_every_token_trains_as_if_its_turn_trained_by_itself(model: Any) -> None:
    differences, branched = [], 0
    for seed in range(100):
        group = drawn(seed)
        differences.append(far(of_rows(model, group, Session.episode), of_turns(model, group)))
        branched += any(isinstance(session.episode(), Episode) for session, _ in group)
    assert max(differences) < TOLERANCE and branched > 60


def unmasked(session: Session) -> Sampled | None:
    """A control: an answer that several conversations share trains in each of them."""
    rows = [as_trajectory(leaf) for leaf in session.leaves() if leaf.role != "judge" and leaf.completion.token_ids]
    return Episode(trajectories=rows) if rows else None


def with_frozen(session: Session) -> Sampled | None:
    session.roles = {}
    return session.episode()


def only_last(session: Session) -> Sampled | None:
    return session.trajectory("last")


@pytest.mark.parametrize("broken", [unmasked, with_frozen, only_last])
def test_a_broken_episode_trains_otherwise(model: Any, broken: Callable[[Session], Sampled | None]) -> None:
    wrong = 0
    for seed in range(15):
        if all(broken(session) is not None for session, _ in drawn(seed)):
            group = drawn(seed)
            expected = of_turns(model, group)
            wrong += far(of_rows(model, group, broken), expected) > 0.01 and bool(expected.norm() > 0)
    assert wrong >= 5


def test_rows_that_count_as_episodes_train_otherwise(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhub.algorithms.estimation.episode_rows", lambda group, episode_id, gather: None)
    wrong = sum(far(of_rows(model, drawn(seed), Session.episode), of_turns(model, drawn(seed))) > 0.01 for seed in range(15))
    assert wrong >= 5


def test_answers_that_train_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metric comes from the masks.  The control is a mask that lacks an answer."""
    for seed in range(30):
        for session, _ in drawn(seed):
            found = session.episode()
            assert found is not None and found.metrics["openai/untrained_tokens"] == 0
            written = sum(len(turn.completion.token_ids) for turn in session.turns)
            assert found.num_tokens + found.metrics["openai/frozen_tokens"] == written
            assert found.metrics["openai/segments"] == len(list(session.leaves()))
    monkeypatch.setattr(sessions, "as_trajectory", lambda leaf, trained=None: as_trajectory(leaf, trained[:1]))
    assert any(
        found.metrics["openai/untrained_tokens"] > 0
        for seed in range(30)
        for session, _ in drawn(seed)
        if (found := session.episode()) is not None
    )
