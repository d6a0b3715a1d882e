"""A run goes on from a checkpoint whose tensors its settings fit, and from no other: told before any worker starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhub.checkpoint.store import Checkpoint
from rlhub.config.rules.derive import derive
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.preference import DPOConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.config.sections.training import FSDPConfig, MegatronConfig
from rlhub.errors import ConfigError
from rlhub.trainer.ppo.sync_source import STREAMED
from rlhub.trainer.training import EXTRAS, RESUME_RECORD, TrainingConfig, changed_inputs, check_resume, resume_record

SIZES = {"model_type": "qwen2", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}
Change = Callable[[PPOConfig], object]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, sizes in (("model", {}), ("copy", {"rope_theta": 5.0}), ("deeper", {"num_hidden_layers": 3})):
        save(Path(name), **sizes)


def save(folder: Path, **sizes: object) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SIZES | sizes))


def ppo(change: Change = lambda _: None, *, estimator: str = "grpo", rank: int = 4) -> PPOConfig:
    config = PPOConfig()
    config.algorithm.adv_estimator = estimator
    config.actor_rollout_ref.model.path, config.actor_rollout_ref.model.lora_rank = "model", rank
    change(config)
    derive(config)
    return config


def checkpoint_of(config: TrainingConfig, *folders: str, **state: object) -> Checkpoint:
    """As a run with this configuration saves it."""
    path = Path("global_step_3").absolute()
    for folder in folders:
        save(path / folder / "huggingface")
    kept = json.loads(json.dumps({RESUME_RECORD: resume_record(config), **state}))
    return Checkpoint(path=path, step=3, state=kept, metrics={})


def model(name: str, value: object) -> Change:
    return lambda config: setattr(config.actor_rollout_ref.model, name, value)


def dtype(config: PPOConfig) -> None:
    config.actor_rollout_ref.actor.fsdp_config = FSDPConfig(model_dtype="bf16")


def megatron(config: PPOConfig) -> None:
    config.actor_rollout_ref.actor.strategy = "megatron"
    config.actor_rollout_ref.actor.megatron = MegatronConfig(model_dtype="bf16")


@pytest.mark.parametrize(
    "now",
    [
        ppo,
        lambda: ppo(model("path", "copy")),
        lambda: ppo(model("path", "some/hub-name")),
        lambda: ppo(model("lora_alpha", 16.0)),
        lambda: ppo(model("target_modules", ["all-linear"])),
        lambda: ppo(lambda config: setattr(config.actor_rollout_ref.actor.optim, "lr", 1.0)),
    ],
)
def test_what_changes_no_tensor_goes_on(now: Callable[[], PPOConfig]) -> None:
    check_resume(now(), checkpoint_of(ppo(), "actor"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (model("lora_rank", 8), ("actor_rollout_ref.model.lora_rank was 4 and is 8 now",)),
        (model("lora_rank", 0), ("lora_rank was 4 and is 0 now",)),
        (model("lora_alpha", 32), ("lora_alpha was 16 and is 32 now",)),
        (model("target_modules", ["q_proj", "v_proj"]), ("target_modules was all-linear and is [q_proj,v_proj] now",)),
        (model("path", "deeper"), ("another shape (num_layers 2 -> 3", "path was model and is deeper now")),
        (model("override_config", {"vocab_size": 72}), ("another shape (vocab_size 64 -> 72",)),
        (dtype, ("actor.fsdp_config keeps its weights in bf16 now", "saved in fp32")),
        (lambda config: setattr(config.algorithm, "adv_estimator", "gae"), ("holds no critic", "adv_estimator=gae")),
    ],
)
def test_what_does_not_fit_is_named_with_both_values_and_the_remedy(change: Change, said: tuple[str, ...]) -> None:
    checkpoint = checkpoint_of(ppo(), "actor")
    with pytest.raises(ConfigError) as caught:
        check_resume(ppo(change), checkpoint)
    (problem,) = caught.value.problems
    for part in (*said, str(checkpoint.path), "set it back", "trainer.experiment_name", "trainer.resume_mode=disable"):
        assert part in problem, problem


class TestWhatTheRunGoesOnWith:
    """Files and rows may be other than they were under the same names: that is said, and is no error."""

    def said(self, before: str | None = None, now: str | None = None) -> list[str]:
        """before, now: fingerprints of the rows' extras."""
        config = ppo()
        config.custom_reward_function.path = "reward.py"
        config.actor_rollout_ref.rollout.agent.default_agent_loop = "flows.py:Flow"
        config.reward_model.judge.prompt_template = "Judge {question} {response}"
        if not Path("reward.py").exists():
            Path("reward.py").write_text("1")
            Path("flows.py").write_text("1")
            self.checkpoint = checkpoint_of(config, "actor", **({} if before is None else {EXTRAS: before}))
        return changed_inputs(config, self.checkpoint, now)

    def test_an_edited_reward_file_is_named(self) -> None:
        assert self.said() == []
        Path("reward.py").write_text("2")
        (text,) = self.said()
        assert (
            text.startswith("custom_reward_function.path=reward.py is another file, or was edited since")
            and "goes on with what is there" in text
        )
        Path("flows.py").unlink()  # its absence is found elsewhere
        assert len(self.said()) == 1

    @pytest.mark.parametrize(
        ("before", "now", "changed"),
        [(None, "a", False), ("a", "a", False), ("a", "b", True), (None, None, False)],
    )
    def test_changed_extra_info_is_named(self, before: str | None, now: str | None, changed: bool) -> None:
        found = self.said(before, now)
        assert [("extra_info" in text and "data.train_files" in text) for text in found] == ([True] if changed else [])

    def test_a_checkpoint_that_recorded_nothing_is_taken_as_it_is(self) -> None:
        old = Checkpoint(path=Path("global_step_1"), step=1, state={"loader": {}}, metrics={})
        config = ppo()
        config.custom_reward_function.path = "reward.py"
        Path("reward.py").write_text("1")
        assert changed_inputs(config, old, "a") == []


def test_adapters_where_there_were_none() -> None:
    before = checkpoint_of(ppo(rank=0), "actor")
    with pytest.raises(ConfigError, match="lora_rank was 0 and is 4 now"):
        check_resume(ppo(), before)
    check_resume(ppo(model("lora_alpha", 99), rank=0), before)  # of adapters that there are not


def test_the_critic_is_a_model_of_its_own() -> None:
    before = checkpoint_of(ppo(estimator="gae"), "actor", "critic")
    check_resume(ppo(estimator="gae"), before)
    check_resume(ppo(), before)  # a critic that nobody needs any more
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.model\.lora_rank was 4 and is 8 now; .*lora_rank was 4 and is 8"):
        check_resume(ppo(estimator="gae", rank=8), before)


def test_engines_that_keep_the_same_weights_take_over_from_each_other() -> None:
    """Megatron's optimizer steps float32 weights whatever its model computes in."""
    before = checkpoint_of(ppo(rank=0), "actor")
    check_resume(ppo(megatron, rank=0), before)
    with pytest.raises(ConfigError, match="keeps its weights in fp32 now .* saved in bf16"):
        check_resume(ppo(megatron, rank=0), checkpoint_of(ppo(dtype, rank=0)))


def supervised(cls: type[SFTConfig] | type[DPOConfig]) -> SFTConfig | DPOConfig:
    config = cls()
    config.model.path = "model"
    derive(config)
    return config


def test_the_folder_of_another_trainer() -> None:
    """All have one folder by default."""
    before = checkpoint_of(supervised(SFTConfig), "model")
    check_resume(supervised(SFTConfig), before)
    for other in (ppo(), supervised(DPOConfig)):
        with pytest.raises(ConfigError, match=r"it was saved by main_sft, and this is main_(ppo|dpo)\. To go on"):
            check_resume(other, before)
    before.state.pop(RESUME_RECORD)
    check_resume(supervised(SFTConfig), before)  # of a version that kept no account
    with pytest.raises(ConfigError, match="it holds no actor, which main_ppo trains"):
        check_resume(ppo(), before)


def test_prompts_in_work_need_episodes() -> None:
    before = checkpoint_of(ppo(), "actor", **{STREAMED: {}})
    with pytest.raises(ConfigError, match=r"rollout\.mode=async"):
        check_resume(ppo(), before)
    check_resume(ppo(lambda config: setattr(config.actor_rollout_ref.rollout, "mode", "async")), before)
