"""Mini-batches and their tokens must not depend on the ranks; ranks must hold what chunking sends them, evenly loaded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhub.algorithms import estimation
from rlhub.algorithms.estimation import token_keys
from rlhub.algorithms.inputs import PolicyLossInputs
from rlhub.algorithms.masked import Denominators, aggregate, masked
from rlhub.algorithms.registry import POLICY_LOSSES
from rlhub.algorithms.statistics import Gather
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.protocol import DataProto
from rlhub.trainer.ppo.dealing import arrange, capacities_of, mini_batch_ids, part_sizes
from rlhub.trainer.ppo.step import number_samples
from tests.unit.trainer.ppo.test_step import config_of, learn


def batch_of(lengths: list[int]) -> DataProto:
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    return DataProto.from_dict(tensors={"attention_mask": mask, "row": torch.arange(len(lengths))})


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    per_mini_batch=st.integers(1, 17),
    ranks=st.integers(1, 5),
    balance=st.booleans(),
)
def test_membership_is_the_same_for_any_number_of_ranks(lengths, per_mini_batch, ranks, balance) -> None:
    def members(num_ranks: int) -> dict[int, set[int]]:
        batch = arrange(batch_of(lengths), rows_per_mini_batch=per_mini_batch, num_ranks=num_ranks, balance=balance)
        found: dict[int, set[int]] = {}
        for row, index in zip(batch.batch["row"].tolist(), batch.batch["mini_batch"].tolist(), strict=True):
            found.setdefault(index, set()).add(row)
        return found

    assert members(ranks) == members(1)
    assert sorted(row for rows in members(ranks).values() for row in rows) == list(range(len(lengths)))


def test_rows_of_a_prompt_stay_on_one_rank_where_their_prefixes_are_shared() -> None:
    def ranks_of_prompts(**options: bool) -> list[int]:
        batch = batch_of([20 + row % 7 for row in range(24)])
        batch.batch["uid"] = torch.arange(6).repeat_interleave(4)
        batch.batch["prompt_length"] = torch.full((24,), 8)
        batch.batch["response_length"] = torch.tensor([12 + row % 7 for row in range(24)])
        arrange(batch, rows_per_mini_batch=12, num_ranks=3, balance=True, **options)
        ranks = torch.arange(3).repeat_interleave(8)
        return [len(ranks[batch.batch["uid"] == uid].unique()) for uid in range(6)]

    assert ranks_of_prompts(whole_groups=True) == [1] * 6
    assert max(ranks_of_prompts()) > 1


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=20),
    per_mini_batch=st.integers(1, 7),
    ranks=st.integers(1, 5),
    shuffle_seed=st.none() | st.integers(0, 9),
)
def test_a_mini_batch_has_its_number_of_episodes_with_all_of_their_rows(counts, per_mini_batch, ranks, shuffle_seed) -> None:
    episode_id = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    batch = batch_of([5 + row % 3 for row in range(len(episode_id))])
    batch.batch["episode_id"] = episode_id
    arrange(
        batch,
        rows_per_mini_batch=per_mini_batch,
        num_ranks=ranks,
        balance=True,
        shuffle_seed=shuffle_seed,
        critic_rows_per_mini_batch=len(counts),
    )
    assert sorted(batch.batch["row"].tolist()) == list(range(len(episode_id)))
    assert set(batch.batch["critic_mini_batch"].tolist()) == {0}
    places = dict(zip(batch.batch["row"].tolist(), batch.batch["mini_batch"].tolist(), strict=True))
    of_episode = [{places[row] for row in (episode_id == number).nonzero().flatten().tolist()} for number in range(len(counts))]
    assert all(len(found) == 1 for found in of_episode)
    sizes = [sum(found == {index} for found in of_episode) for index in range(max(places.values()) + 1)]
    assert sizes == [len(part) for part in torch.arange(len(counts)).split(per_mini_batch)]
    alone = mini_batch_ids(len(counts), per_mini_batch, shuffle_seed)
    assert [{index} for index in alone.tolist()] == of_episode, "as where each episode has one row"


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), ranks=st.integers(1, 5))
def test_capacities_fill_mini_batches_and_parts(sizes, ranks) -> None:
    plan = capacities_of(sizes, ranks)
    assert [sum(row) for row in plan] == sizes
    assert [sum(row[rank] for row in plan) for rank in range(ranks)] == part_sizes(sum(sizes), ranks)


def test_parts_match_what_chunk_sends() -> None:
    batch = arrange(batch_of([5] * 11), rows_per_mini_batch=4, num_ranks=3, balance=True)
    assert [len(part) for part in batch.chunk(3)] == part_sizes(11, 3)


def test_balancing_evens_out_tokens_and_its_absence_does_not() -> None:
    lengths = [100, 100, 100, 100, 1, 1, 1, 1]

    def worst(balance: bool) -> int:
        batch = arrange(batch_of(lengths), rows_per_mini_batch=8, num_ranks=2, balance=balance)
        return max(int(part.batch["attention_mask"].sum()) for part in batch.chunk(2))

    assert worst(True) == 202
    assert worst(False) >= 202


def test_shuffle_is_a_function_of_the_seed() -> None:
    assert torch.equal(mini_batch_ids(64, 16, 3), mini_batch_ids(64, 16, 3))
    assert not torch.equal(mini_batch_ids(64, 16, 3), mini_batch_ids(64, 16, 4))
    assert mini_batch_ids(64, 16, 3).bincount().tolist() == [16] * 4


def test_the_critic_may_have_mini_batches_of_its_own() -> None:
    batch = arrange(batch_of([5] * 12), rows_per_mini_batch=6, num_ranks=2, balance=True, critic_rows_per_mini_batch=4)
    own = batch.batch["row"] // 4
    assert torch.equal(batch.batch["critic_mini_batch"], own)
    assert batch.batch["mini_batch"].max() == 1


# Tokens that a policy loss chooses: the same tokens and gradient on any number of ranks and in any micro-batches.

ROWS, PROMPT, RESPONSE, MINI = 12, 2, 6, 4
KNOBS = {
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": -1.0, "clip_cov_ub": 1.0},
    "kl_cov": {"kl_cov_ratio": 0.25, "ppo_kl_coef": 0.5},
}
SELECTING = [name for name in POLICY_LOSSES.names() if "select" in POLICY_LOSSES.row(name).companions]


def config_for(name: str) -> PPOConfig:
    config = PPOConfig(trainer=TrainerConfig(batches="driver"))  # the fake groups have no stores
    config.actor_rollout_ref.actor.policy_loss.loss_mode = name
    config.actor_rollout_ref.actor.policy_loss.kwargs = dict(KNOBS[name])
    return config


def drawn_batch(*, num_ranks: int, shuffle_seed: int | None = None) -> DataProto:
    """The same samples for any number of ranks, with what the selection reads; NaN outside the mask; a column that says who is
    who."""
    generator = torch.Generator().manual_seed(5)
    mask = (torch.rand(ROWS, RESPONSE, generator=generator) < 0.7).long()
    mask[3] = 0
    nan = torch.full((ROWS, RESPONSE), float("nan"))
    floats = [torch.randn(ROWS, RESPONSE, generator=generator, dtype=torch.float64) for _ in range(2)]
    advantages, log_probs = (torch.where(mask.bool(), column.float(), nan) for column in floats)
    batch = DataProto.from_dict(
        {
            "who": torch.arange(ROWS),
            "attention_mask": torch.cat([torch.ones(ROWS, PROMPT).long(), mask], 1),
            "loss_mask": mask,
            "advantages": advantages,
            "old_log_probs": log_probs,
        }
    )
    number_samples(batch)
    return arrange(batch, rows_per_mini_batch=MINI, num_ranks=num_ranks, balance=True, shuffle_seed=shuffle_seed)


def select_tokens(batch: DataProto, config: PPOConfig, step: int) -> Tensor:
    columns, actor = dict(batch.batch.items()), config.actor_rollout_ref.actor
    outputs = estimation.select_tokens(columns, Gather.of(columns["sample_index"]), actor, seed=config.trainer.seed, step=step)
    return outputs.columns["selected"]


def by_sample(batch: DataProto, column: Tensor) -> Tensor:
    return column[batch.batch["who"].argsort()]


def gradient(name: str, batch: DataProto, selected: Tensor, num_ranks: int, micro_rows: int) -> Tensor:
    """Of the second optimizer step's loss in the log-probs of all samples, summed over ranks and micro-batches."""
    knobs = POLICY_LOSSES.knobs_class(name)(**KNOBS[name])
    log_probs = torch.zeros(ROWS, RESPONSE).uniform_(-2, 0, generator=torch.Generator().manual_seed(2)).requires_grad_()
    total = torch.zeros_like(log_probs)
    in_step = batch.batch["mini_batch"] == 1
    mask = batch.batch["loss_mask"]
    counts = Denominators(tokens=float(mask[in_step].sum()), sequences=float(mask[in_step].any(1).sum()))
    for part in torch.arange(ROWS).chunk(num_ranks):
        for rows in part[in_step[part]].split(micro_rows):
            inputs = PolicyLossInputs(
                log_probs=log_probs[batch.batch["who"][rows]],
                old_log_probs=batch.batch["old_log_probs"][rows],
                advantages=batch.batch["advantages"][rows],
                response_mask=mask[rows],
                selected=selected[rows],
            )
            outputs = POLICY_LOSSES.get(name)(inputs, knobs)
            total += torch.autograd.grad(aggregate(outputs.loss, mask[rows], "token-mean", counts), log_probs)[0]
    return total


@pytest.mark.parametrize("shuffle_seed", [None, 3])
@pytest.mark.parametrize("name", SELECTING)
def test_tokens_and_gradient_are_the_same_on_any_number_of_ranks(name: str, shuffle_seed: int | None) -> None:
    alone = drawn_batch(num_ranks=1, shuffle_seed=shuffle_seed)
    chosen = select_tokens(alone, config_for(name), step=7)
    assert 0 < chosen.sum() < alone.batch["loss_mask"].sum()
    expected = gradient(name, alone, chosen, 1, ROWS)
    for num_ranks in (1, 2, 4):
        batch = drawn_batch(num_ranks=num_ranks, shuffle_seed=shuffle_seed)
        selected = select_tokens(batch, config_for(name), step=7)
        assert torch.equal(by_sample(batch, selected), by_sample(alone, chosen))
        for micro_rows in (1, 2, ROWS):
            torch.testing.assert_close(gradient(name, batch, selected, num_ranks, micro_rows), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", SELECTING)
def test_a_selection_within_each_rank_or_by_place_is_another_one(name: str) -> None:
    """Control: what would happen without the samples' numbers, or with the choice left to the ranks."""
    alone, batch = drawn_batch(num_ranks=1), drawn_batch(num_ranks=4)
    config = config_for(name)
    chosen = by_sample(alone, select_tokens(alone, config, step=7))
    parts = [select_tokens(part, config, step=7) for part in batch.chunk(4)]
    assert not torch.equal(by_sample(batch, torch.cat(parts)), chosen)
    if name == "clip_cov":  # the other takes the largest, keys or not
        number_samples(batch)
        assert not torch.equal(by_sample(batch, select_tokens(batch, config, step=7)), chosen)


def test_each_mini_batch_selects_its_share_of_its_own_tokens() -> None:
    batch = drawn_batch(num_ranks=2)
    selected = select_tokens(batch, config_for("kl_cov"), step=1)
    for index in range(ROWS // MINI):
        rows = batch.batch["mini_batch"] == index
        assert selected[rows].sum() == int(0.25 * int(batch.batch["loss_mask"][rows].sum()))
    assert not masked(selected, 1 - batch.batch["loss_mask"]).any()


def test_another_step_or_seed_draws_other_tokens() -> None:
    batch, config = drawn_batch(num_ranks=1), config_for("clip_cov")
    first = select_tokens(batch, config, step=1)
    assert torch.equal(select_tokens(batch, config, step=1), first)
    assert not torch.equal(select_tokens(batch, config, step=2), first)
    config.trainer.seed += 1
    assert not torch.equal(select_tokens(batch, config, step=1), first)


def test_keys_belong_to_sample_and_position() -> None:
    keys = token_keys(1, 2, torch.arange(5).numpy(), 4)
    assert keys.dtype == torch.float64 and keys.shape == (5, 4)
    assert torch.equal(token_keys(1, 2, torch.tensor([3, 0]).numpy(), 6)[:, :4], keys[[3, 0]])


@pytest.mark.parametrize("dp_size", [1, 2])
def test_a_step_sends_the_selection_and_makes_the_pass_it_reads(dp_size: int) -> None:
    config = config_of(samples=4)
    config.actor_rollout_ref.actor.policy_loss.loss_mode = "kl_cov"
    config.actor_rollout_ref.actor.policy_loss.kwargs = {"kl_cov_ratio": 0.5}
    run = learn(config, dp_size=dp_size)
    assert "actor.compute_log_prob" in run.names()
    sent = run.sent("actor.update_actor").columns
    assert sent["selected"].sum() == sent["learn_mask"].sum() // 2
    assert "sample_index" not in sent and "old_log_probs" in sent


def test_a_loss_that_selects_nothing_gets_no_selection() -> None:
    assert "selected" not in learn(config_of()).sent("actor.update_actor").columns
