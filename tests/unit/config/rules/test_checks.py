"""Rules between settings name what breaks them, with their arithmetic."""

from __future__ import annotations

import pytest

from rlhub.config.rules import checks
from rlhub.config.rules.derive import derive
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.sft import SFTConfig
from tests.unit.config.rules.test_derive import good, put

_A, _R = "actor_rollout_ref__actor__", "actor_rollout_ref__rollout__"
REWARD_MODEL = {"reward_model__enable": True, "reward_model__model__path": "some/model"}
JUDGE = {"reward_model__judge__model__path": "some/judge"}


def test_the_default_passes() -> None:
    assert checks.check(good()) == []


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"data__train_batch_size": 64}, ("64 is less than", "ppo_mini_batch_size=256", "set actor_rollout_ref.actor")),
        ({"data__train_batch_size": 600}, ("600 = 2 x 256 + 88", "200 or 300")),
        ({"critic__ppo_mini_batch_size": 300}, ("critic.ppo_mini_batch_size=300", "1024 = 3 x 300 + 124")),
        (
            {"data__train_batch_size": 2, f"{_A}ppo_mini_batch_size": 2, "trainer__n_gpus_per_node": 4},
            ("2 prompts x n=1 = 2 samples", "1 x trainer.n_gpus_per_node=4 = 4 ranks"),
        ),
        ({f"{_R}max_model_len": 1000}, ("1000 is less than", "512 + data.max_response_length=512 = 1024")),
        ({f"{_R}enable_chunked_prefill": False, f"{_R}max_num_batched_tokens": 512}, ("512 is less than max_model_len=1024",)),
        ({f"{_A}use_dynamic_bsz": True, f"{_A}ppo_max_token_len_per_gpu": 1023}, ("=1023 tokens cannot hold one row", "= 1024")),
        ({"critic__use_dynamic_bsz": True, "critic__ppo_max_token_len_per_gpu": 9}, ("critic.ppo_max_token_len_per_gpu=9",)),
        ({f"{_R}tensor_model_parallel_size": 2, "trainer__n_gpus_per_node": 3}, ("3 = 1 x 2 + 1",)),
        ({f"{_A}fsdp_config.fsdp_size".replace(".", "__"): 2, "trainer__n_gpus_per_node": 3}, ("fsdp_size=2", "3 ranks")),
        ({"trainer__backend": "local", "trainer__n_gpus_per_node": 2}, ("backend=local", "2 ranks")),
        ({"algorithm__filter_groups__enable": True}, ("filter_groups.enable=true", "rollout.n=1", "2 or more")),
        (
            {
                "algorithm__filter_groups__enable": True,
                f"{_R}n": 2,
                "algorithm__filter_groups__metric": "seq_final_reward",
                "algorithm__use_kl_in_reward": True,
            },
            ("metric=seq_final_reward", "use seq_reward"),
        ),
        ({"trainer__resume_mode": "resume_path"}, ("trainer.resume_from_path",)),
        ({"trainer__test_freq": 5, "data__val_files": None}, ("data.val_files is not set",)),
        ({"trainer__keep_best": "val/pass@1", "data__val_files": None}, ("needs validation",)),
        ({"trainer__save_freq": 0}, ("trainer.save_freq=0",)),
        ({"critic__optim__betas": [0.9]}, ("critic.optim.betas",)),
        ({"reward_model__enable": True}, ("reward_model.enable=true", "reward_model.model.path is not set")),
        ({"reward_model__function_weight": 0}, ("function_weight=0 leaves nothing to score with",)),
        ({"reward_model__function_weight": float("nan")}, ("reward_model.function_weight=nan",)),
        (REWARD_MODEL | {"reward_model__weight": float("inf")}, ("reward_model.weight=inf",)),
        (REWARD_MODEL | {"reward_model__model__fsdp_config__fsdp_size": 2}, ("reward_model.model.fsdp_config.fsdp_size=2",)),
        (
            REWARD_MODEL | {"reward_model__use_dynamic_bsz": True, "reward_model__forward_max_token_len_per_gpu": 9},
            ("reward_model.forward_max_token_len_per_gpu=9",),
        ),
        (JUDGE | {"reward_model__judge__min_score": 10.0}, ("min_score=10.0 is not less than",)),
        (JUDGE | {"reward_model__judge__n": 2}, ("judge.n=2", "temperature=0")),
        (JUDGE | {"reward_model__judge__tensor_model_parallel_size": 2}, ("1 = 0 x 2 + 1",)),
    ],
)
def test_each_rule_names_what_breaks_it(values: dict[str, object], parts: tuple[str, ...]) -> None:
    (problem,) = checks.check(good(**values))
    assert all(part in problem for part in parts), problem


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({}, ()),
        ({"actor_rollout_ref__actor__strategy": "megatron"}, ("strategy=megatron", "strategy=fsdp2")),
        ({"actor_rollout_ref__model__use_remove_padding": False}, ("use_remove_padding=false", "set it to true")),
        ({"actor_rollout_ref__model__vla": {"chunk": 1}}, ("model.vla",)),
    ],
)
def test_prefixes_are_shared_by_packed_rows_of_fsdp2(values: dict[str, object], parts: tuple[str, ...]) -> None:
    found = [
        text for text in checks.check(good(actor_rollout_ref__actor__prefix_packing=True, **values)) if "prefix_packing" in text
    ]
    assert len(found) == bool(parts) and all(part in text for text in found for part in (*parts, "or prefix_packing=false"))


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({}, ""),
        ({"actor_rollout_ref__actor__strategy": "megatron"}, ""),
        ({"actor_rollout_ref__rollout__mode": "async"}, "rollout.mode=async: episodes"),
        ({"actor_rollout_ref__model__vla": {"chunk": 1}}, "policy of actions"),
        ({"trainer__replay_from": "/old"}, "trainer.replay_from=/old"),
        ({"actor_rollout_ref__actor__prefix_packing": True}, "prefix_packing=true: rows that share a token"),
        (
            {
                "actor_rollout_ref__actor__strategy": "megatron",
                "actor_rollout_ref__actor__megatron__override_transformer_config": {"recompute_modules": ["moe"]},
            },
            "recompute_modules",
        ),
    ],
)
def test_experts_are_replayed_where_rows_bring_them(values: dict[str, object], part: str) -> None:
    key = "actor_rollout_ref.actor.router_replay=rollout"
    found = [text for text in checks.check(good(actor_rollout_ref__actor__router_replay="rollout", **values)) if key in text]
    assert len(found) == bool(part) and all(part in text and "or router_replay=disabled" in text for text in found)
    assert not any("router_replay" in text for text in checks.check(good(**values)))


def test_problems_come_together() -> None:
    assert len(checks.check(good(trainer__test_freq=0, data__train_batch_size=64, trainer__save_freq=0))) == 3


def test_required_settings() -> None:
    keys = checks.REQUIRED[PPOConfig]
    assert checks.check_required(good(), keys) == []
    first, second = checks.check_required(good(data__train_files=[], actor_rollout_ref__model__path=None), keys)
    assert first.startswith("data.train_files is not set") and "bash scripts/quickstart.sh" in first
    assert second.startswith("actor_rollout_ref.model.path is not set")


def test_group_estimators_need_groups() -> None:
    (problem,) = checks.check_requirements(good(), frozenset({"groups"}))
    assert "actor_rollout_ref.rollout.n=1" in problem and "2 or more" in problem
    assert checks.check_requirements(good(actor_rollout_ref__rollout__n=2), frozenset({"groups"})) == []
    assert checks.check_requirements(good(), frozenset({"values"})) == []
    (problem,) = checks.check_requirements(good(), frozenset({"reference"}))
    assert "set actor_rollout_ref.ref.model.path to its folder" in problem


def test_uneven_sizes_are_stated() -> None:
    texts = checks.notes(good(trainer__n_gpus_per_node=3))
    assert "1024 prompts x n=1 = 1024 samples = 3 ranks x 341 + 1" in texts[0] and len(texts) == 2
    assert checks.notes(good(trainer__n_gpus_per_node=4)) == []


def test_sft_rules() -> None:
    config = SFTConfig()
    put(config, data__use_dynamic_bsz=True, data__max_token_len_per_gpu=8, trainer__device="cpu")
    derive(config)
    texts = checks.check(config)
    assert [text.split()[0] for text in texts] == ["data.max_token_len_per_gpu=8"]
    assert len(checks.check_required(config, checks.REQUIRED[SFTConfig])) == 2


MULTI = {"trainer__controller": "multi"}


@pytest.mark.parametrize(
    ("values", "what", "remedy"),
    [
        ({"trainer__batches": "driver"}, "trainer.batches=driver", "set trainer.batches=reference"),
        ({"trainer__backend": "local"}, "trainer.backend=local", "set trainer.backend=ray"),
        ({f"{_R}mode": "async"}, "rollout.mode=async", "rollout.mode=sync"),
        ({"trainer__replay_from": "batches"}, "trainer.replay_from", "set it to null"),
        ({"trainer__record_batches": True}, "trainer.record_batches", "set it to false"),
    ],
)
def test_what_one_driver_must_do_is_refused_on_every_rank(values: dict[str, object], what: str, remedy: str) -> None:
    def refused(values: dict[str, object]) -> list[str]:
        return [text for text in checks.check(good(**values)) if text.startswith("trainer.controller=multi with")]

    assert refused(MULTI) == [] and refused(values) == []
    (problem,) = refused({**MULTI, **values})
    assert what in problem and remedy in problem and "or trainer.controller=single" in problem


def test_supervised_training_has_one_driver() -> None:
    config = SFTConfig()
    derive(config)
    config.trainer.controller = "multi"
    assert "trainer.controller=multi is for main_ppo; set trainer.controller=single" in checks.check(config)
