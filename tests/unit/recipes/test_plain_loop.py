"""embodied_reach's plain loop: its demonstrations, its policy and its estimates against those of the product, and short runs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

if find_spec("mujoco") is None:  # not importorskip: how it renders is set before its import
    pytest.skip("the extra 'envs' is not installed: bash scripts/setup_env.sh", allow_module_level=True)

from recipes.embodied_reach.demonstrations import FIRST_WORD, VLA, WORDS, episode_seeds, record
from recipes.embodied_reach.plain_loop import (
    Collector,
    Learner,
    Policy,
    Settings,
    chunk_log_probs,
    demonstration_rows,
    estimated,
    run,
    seen,
)
from recipes.tiny_smolvlm import build_tokenizer
from rlhub.algorithms.advantages.gae import ChunkGAEKnobs, advantages_of
from rlhub.data.episodes import EpisodeDataset, write_episodes
from rlhub.models.vla.policy import bin_head, hidden_states, place_tokens, values_of

SHORT = Settings(episodes=8, demonstrations=8, clone_updates=10, iterations=2, check_every=2, checked=16)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_recorded_demonstrations_are_the_rows_of_the_plain_loop(tmp_path: Path) -> None:
    episodes = list(record(5, seed=3))
    write_episodes(tmp_path, episodes)
    tokenizer = build_tokenizer(WORDS, num_places=len(VLA.place_ids), num_bins=VLA.bins)
    data = EpisodeDataset(str(tmp_path), tokenizer, VLA, vocab_size=64)
    images, color, bins, mask = demonstration_rows(episodes)
    batch = data.batch(np.arange(len(data))).batch
    assert len(data) == len(bins) and torch.equal(data.reader.images(range(len(data)))[:, 0], images.permute(0, 3, 1, 2))
    assert torch.equal(batch["responses"] - VLA.first_bin_id, bins) and torch.equal(batch["response_mask"].bool(), mask)
    assert torch.equal(batch["prompts"][:, 1] - FIRST_WORD - 1, color)
    assert torch.equal(batch["input_ids"][:, : -VLA.num_tokens], Policy(1).prompts[color][:, : -VLA.num_tokens])


def test_demonstrations_follow_from_their_seed_and_slips_are_not_recorded() -> None:
    first, again, other = (list(record(12, seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(a.actions, b.actions) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a.actions, b.actions) for a, b in zip(first, other, strict=True))
    straight = list(record(12, 1, slip=0.0))
    assert all(np.array_equal(a.actions[0], b.actions[0]) for a, b in zip(first, straight, strict=True))
    assert sum(len(one.actions) for one in first) > sum(len(one.actions) for one in straight)
    assert not set(episode_seeds("checks", 1, 50)) & set(episode_seeds("demonstrations", 1, 50))


def test_the_policy_is_that_of_the_engines() -> None:
    policy = Policy(1)
    torch.nn.init.normal_(policy.v_head.weight)
    policy.model.add_module("v_head", policy.v_head)
    images = torch.randint(0, 256, (6, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    color = torch.arange(6) % 2
    with torch.no_grad():
        logits, values = policy(images, color)
        ids = policy.prompts[color]
        tokens = place_tokens(ids, torch.ones_like(ids), VLA.num_tokens, VLA)
        hidden = hidden_states(policy.model, VLA, tokens, images.permute(0, 3, 1, 2)[:, None])[tokens.sources]
        weight, _ = bin_head(policy.model, VLA)
        torch.testing.assert_close(logits, hidden @ weight.t(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(values, values_of(policy.model, VLA, hidden[:, 0]), rtol=1e-5, atol=1e-5)


def test_advantages_are_those_of_chunk_gae() -> None:
    generator = torch.Generator().manual_seed(1)
    rewards, values, after = (torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    ended = torch.tensor([[0, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1], [0, 1, 0, 1, 0]], dtype=torch.bool)
    terminated = ended & (torch.arange(5) % 2 == 0)
    valid = ended.long().cumsum(0) - ended.long() == 0
    following = torch.where(ended, after, values.roll(-1, 0)).where(~terminated, 0.0)
    following[-1] = torch.where(terminated[-1], 0.0, after[-1])
    found = estimated(rewards, values, following, ended, SHORT)
    call, episode = (place[valid] for place in torch.meshgrid(torch.arange(4), torch.arange(5), indexing="ij"))
    rows = {"rewards": rewards, "values": values, "next_values": after, "terminated": terminated.long(), "valid": valid.long()}
    columns = {name: column[valid] for name, column in rows.items()} | {"call": call, "episode": episode}
    torch.testing.assert_close(found[valid], advantages_of(columns, ChunkGAEKnobs(gamma=0.8, lam=0.8)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("settings", [SHORT, Settings(episodes=8, group=4, grpo=True), Settings(episodes=8, group=4, srpo=True)])
def test_rows_have_the_log_probs_of_the_policy_that_acted(settings: Settings) -> None:
    policy = Policy(1)
    collector = Collector(settings)
    rows, numbers = collector.collect(policy)
    logits, _ = policy(rows.images, rows.color)
    torch.testing.assert_close(chunk_log_probs(logits, rows.tokens, rows.mask), rows.log_probs, rtol=1e-4, atol=1e-5)
    assert 8 <= len(rows) <= 32 and 0 <= numbers["solved"] <= 1
    starts, _ = seen(collector.obs, black=False)
    assert len(torch.unique(starts.flatten(1), dim=0)) > 1
    assert Learner(policy, settings).update(rows)["updates"] >= 1


def test_a_short_run_clones_and_learns_and_a_frozen_one_stays(capsys: pytest.CaptureFixture[str]) -> None:
    run(SHORT)
    printed = capsys.readouterr().out
    assert all(stage in printed for stage in ("clone", "start", "iteration", "other colour", "blindfolded"))
    frozen = run(Settings(episodes=8, iterations=1, from_scratch=True, frozen=True, checked=32))
    assert frozen.success[0] == frozen.success[1]
