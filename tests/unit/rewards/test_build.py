"""`build_reward_manager` with real children."""

from pathlib import Path

import pytest

from rlhub.config.sections.reward import CustomRewardConfig, RewardModelConfig
from rlhub.errors import ConfigError, RegistryError
from rlhub.rewards import build_reward_manager
from rlhub.rewards.managers import reward_target
from tests.unit.rewards.test_managers import WIDTH, Letters, make_batch


def test_the_built_in_scorers_are_the_default() -> None:
    manager = build_reward_manager(RewardModelConfig(on_error="fail"), CustomRewardConfig(), Letters(), WIDTH)
    batch = make_batch(["#### 1", "#### 2"])
    batch.non_tensor_batch["data_source"][:] = "openai/gsm8k"
    batch.non_tensor_batch["ground_truth"][:] = "2"
    assert manager(batch).scores.tolist() == [0.0, 1.0]
    manager.close()


def test_a_function_of_ones_own_by_a_path_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "neighbour.py").write_text("FACTOR = 3\n")
    (tmp_path / "own.py").write_text(
        "from neighbour import FACTOR\ndef reward(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': FACTOR * len(solution_str), 'i': extra_info['i']}\n"
    )
    monkeypatch.chdir(tmp_path)
    dapo = RewardModelConfig(reward_manager="dapo", reward_kwargs={"overlong_buffer_cfg": {"enable": True, "len": 2}})
    manager = build_reward_manager(dapo, CustomRewardConfig(path="own.py", name="reward"), Letters(), WIDTH)
    result = manager(make_batch(["ab", "abcdef"]))
    assert result.scores.tolist() == [6.0, 17.0] and result.extra["i"].tolist() == [0.0, 1.0]
    manager.close()


def test_mistakes_are_configuration_errors_that_name_the_key(tmp_path: Path) -> None:
    def build(reward_model: RewardModelConfig, custom: CustomRewardConfig | None = None) -> None:
        build_reward_manager(reward_model, custom or CustomRewardConfig(), Letters(), WIDTH)

    broken = tmp_path / "broken.py"
    broken.write_text("def compute_score(text): return 0\n")
    with pytest.raises(ConfigError, match="custom_reward_function.path=missing.py: no such file"):
        build(RewardModelConfig(), CustomRewardConfig(path="missing.py"))
    with pytest.raises(ConfigError, match=r"(?s)custom_reward_function: cannot load .*broken.py:compute_score.*solution_str"):
        build(RewardModelConfig(), CustomRewardConfig(path=str(broken)))
    with pytest.raises(ConfigError, match=r"(?s)custom_reward_function: .*no attribute 'scorer'"):
        build(RewardModelConfig(), CustomRewardConfig(path=str(broken), name="scorer"))
    with pytest.raises(RegistryError, match="did you mean 'dapo'"):
        build(RewardModelConfig(reward_manager="dapoo"))
    with pytest.raises(ConfigError, match=r"reward_model.reward_kwargs.overlong_buffer: no such knob"):
        build(RewardModelConfig(reward_manager="dapo", reward_kwargs={"overlong_buffer": {}}))
    with pytest.raises(ConfigError, match=r"reward_model.reward_kwargs: .*len=9 exceeds data.max_response_length"):
        build(RewardModelConfig(reward_manager="dapo", reward_kwargs={"overlong_buffer_cfg": {"enable": True, "len": 9}}))
    with pytest.raises(ConfigError, match="reward_model.reward_kwargs.anything"):
        build(RewardModelConfig(reward_kwargs={"anything": 1}))


def test_without_a_path_the_target_is_the_built_in_one() -> None:
    assert reward_target(CustomRewardConfig()) == "rlhub.rewards.registry:compute_score"
