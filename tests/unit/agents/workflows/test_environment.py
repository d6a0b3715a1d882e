"""Episodes in environments of both kinds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlhub.agents.workflows.base import build_workflow
from rlhub.envs.base import EnvError
from rlhub.errors import ConfigError, DataError, DeadlineError
from tests.support.episode_parts import ScriptedEngine, episode, parts, run, tokenizer, written

TOOL_ENVIRONMENT = '''
from rlhub.envs.base import Environment
from rlhub.tools.schemas import schema_of
from rlhub.utils.tool_calls import ToolResult

CLOSED = []

def buy(item: str, count: int = 1) -> str:
    """Put into the basket.

    item: what.
    """

class Shop(Environment):
    def __init__(self, stock=3):
        self.stock = stock
    async def ainitialize(self, *, seed=None, options=None):
        self.seed = seed
    async def list_tools(self):
        return [schema_of(buy)]
    async def aexecute(self, tool_name, tool_args):
        count = tool_args.get("count", 1)
        if count > self.stock:
            raise ValueError("not so many there")
        self.stock -= count
        return ToolResult(text=f"{self.stock} left", reward=float(count), done=self.stock == 0)
    async def aclose(self):
        CLOSED.append(self.stock)
'''


def buy(count: int) -> str:
    return f'<tool_call>{{"name": "buy", "arguments": {{"item": "tea", "count": {count}}}}}</tool_call>'


def guessing(**settings: Any) -> Any:
    return build_workflow("environment", parts(environment="guess_number", environment_kwargs={"largest": 9}, **settings))


def test_observations_are_the_users_turns_and_rewards_go_to_the_turn_that_earned_them() -> None:
    data = episode("Let us play.", extra_info={"env_options": {"number": 6}})
    found = run(guessing(), ScriptedEngine(replies=["I say 3", "8", "hm", "6", "never asked"]), data)
    first = tokenizer().decode(found.prompt_ids)
    assert first == (
        "<|im_start|>user\nLet us play.\n\nI think of a number from 1 to 9. What is it?<|im_end|>\n<|im_start|>assistant\n"
    )
    said = [text.split("\n")[2].removesuffix("<|im_end|>") for text in written(found)[1::2]]
    assert said == ["It is higher than 3.", "It is lower than 8.", "Say a number."]
    assert found.rewards is not None and found.rewards[-1] == 1.0 == sum(found.rewards)
    assert found.metrics == {"num_turns": 4.0, "env_terminated": 1.0, "env_truncated": 0.0}


def test_samples_of_a_prompt_meet_the_same_environment_and_others_another() -> None:
    def begin(**row: Any) -> list[int]:
        kwargs = {"environment": "grid_walk", "environment_kwargs": {"size": 30}}
        return run(build_workflow("environment", parts(**kwargs)), ScriptedEngine(replies=["up"] * 40), episode(**row)).prompt_ids

    assert begin() == begin() != begin(extra_info={"env_seed": 12})


@pytest.mark.parametrize(("settings", "turns"), [({"max_assistant_turns": 2}, 2), ({"environment_kwargs": {"max_steps": 3}}, 3)])
def test_the_end_of_an_episode(settings: dict[str, Any], turns: int) -> None:
    settings = {"environment": "guess_number", "environment_kwargs": {}} | settings
    found = run(build_workflow("environment", parts(**settings)), ScriptedEngine(replies=["99"] * 9))
    assert found.metrics["num_turns"] == turns and found.metrics["env_truncated"] == float(turns == 3)
    assert found.response_mask[-1] == 1 and not any(found.rewards or [1])


def test_a_turn_may_be_cut_without_ending_the_episode() -> None:
    found = run(guessing(max_turn_tokens=4, max_assistant_turns=2), ScriptedEngine(replies=["3 it is, I am sure", "9"]))
    assert written(found)[0] == "3 it" and written(found)[1].startswith("<|im_end|>\n<|im_start|>user\nIt is")


def test_tool_environments_are_called_like_tools_and_give_the_rewards(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(TOOL_ENVIRONMENT)
    workflow = build_workflow("environment", parts(environment=f"{tmp_path / 'shop.py'}:Shop"))
    found = run(workflow, ScriptedEngine(replies=[buy(9), buy(2) + '<tool_call>{"name": "sell"}</tool_call>', buy(1)]))
    texts = written(found)
    assert "Error: ValueError: not so many there" in texts[1]
    assert "1 left" in texts[3] and "no tool 'sell'" in texts[3] and len(texts) == 5
    rewards = [reward for reward in found.rewards or [] if reward]
    assert rewards == [2.0, 1.0] and found.metrics["tool_failed"] == 2.0
    assert '"name": "buy"' in tokenizer().decode(found.prompt_ids)
    assert workflow._factory.__init__.__globals__["CLOSED"] == [0]


def test_a_hanging_environment_is_a_deadline_error(tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text(
        "import threading\n\nOVER = threading.Event()\n\n\nclass Hang:\n"
        "    def reset(self, *, seed, options):\n        return 'go', {}\n\n"
        "    def step(self, action):\n        OVER.wait(60)\n\n    def close(self):\n        pass\n"
    )
    settings = {"environment": f"{tmp_path / 'hang.py'}:Hang", "step_timeout_s": 0.02, "reset_timeout_s": 0.1}
    workflow = build_workflow("environment", parts(**settings))

    async def play() -> None:
        try:
            await workflow.arun_episode(ScriptedEngine(replies=["x"]), episode())
        finally:
            workflow._factory.step.__globals__["OVER"].set()

    with pytest.raises(DeadlineError, match=r"environment (step|reset)"):  # the latter where its thread had no core for so long
        asyncio.run(play())


def test_images_need_words_for_this_policy(tmp_path: Path) -> None:
    settings = {"environment": "grid_walk", "environment_kwargs": {"images": True}}
    assert "You are at" in tokenizer().decode(
        run(build_workflow("environment", parts(**settings)), ScriptedEngine(replies=["up"] * 40)).prompt_ids
    )
    (tmp_path / "mute.py").write_text(
        "from rlhub.envs.base import ImageObservation\nimport numpy as np\n\n\nclass Mute:\n"
        "    def reset(self, *, seed, options):\n        return ImageObservation(pixels=np.zeros((2, 2, 3), np.uint8)), {}\n\n"
        "    def close(self):\n        pass\n"
    )
    with pytest.raises(EnvError, match="reads only text"):
        run(build_workflow("environment", parts(environment=f"{tmp_path / 'mute.py'}:Mute")), ScriptedEngine(replies=["x"]))


def test_too_long_a_beginning_and_wrong_names() -> None:
    with pytest.raises(DataError, match="max_prompt_length=10"):
        run(guessing(limit=10), ScriptedEngine(replies=["x"]))
    with pytest.raises(LookupError, match="did you mean 'grid_walk'"):
        build_workflow("environment", parts(environment="grid_wlk"))
    for name in ("", "nowhere.py:X", "rlhub.envs.games:Nothing"):
        with pytest.raises(ConfigError):
            build_workflow("environment", parts(environment=name))


def test_many_episodes_have_an_environment_each() -> None:
    workflow = guessing()

    async def all_of_them() -> list[Any]:
        rows = [episode(extra_info={"env_options": {"number": number}}) for number in range(1, 10)]
        return await asyncio.gather(
            *(workflow.arun_episode(ScriptedEngine(replies=["5", str(number)]), rows[number - 1]) for number in range(1, 10))
        )

    assert [sum(found.rewards) for found in asyncio.run(all_of_them())] == [1.0] * 9
