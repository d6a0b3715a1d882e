"""The environments that come with rlhub, in this process, and gymnasium's."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rlhub.envs.base import EnvError, ImageObservation, StepEnvironment
from rlhub.envs.child import packed, plain, unpacked
from rlhub.envs.games import MOVES, PIXELS, GridWalk, GuessNumber
from rlhub.envs.local import LocalEnvironment


def play(simulator: Any, actions: list[Any], seed: int = 3) -> list[Any]:
    seen = [simulator.reset(seed=seed, options=None)[0]]
    return [*seen, *(simulator.step(action)[:4] for action in actions)]


def test_guessing_ends_with_the_number_or_the_last_step() -> None:
    game = GuessNumber(largest=100, max_steps=3)
    game.reset(seed=0, options={"number": 40})
    assert game.step("perhaps 17, no: 50")[0] == "It is lower than 50."
    assert game.step("nothing")[1:4] == (0.0, False, False)
    assert game.step("40") == ("40 is right.", 1.0, True, False, {})
    game.reset(seed=0, options={"number": 40})
    assert [game.step("1")[3] for _ in range(3)] == [False, False, True]


def test_walking_reaches_the_goal_and_stays_inside() -> None:
    grid = GridWalk(size=3, max_steps=50)
    grid.reset(seed=1, options=None)
    grid.load_state({"at": [0, 0], "goal": [1, 1], "steps": 0})
    assert "column 0, row 0" in str(grid.step("left")[0])
    assert grid.step("RIGHT, not up? right")[1:4] == (0.0, False, False)
    assert grid.step("down")[1:4] == (1.0, True, False)
    assert "no direction" in str(grid.step("north")[0])


@pytest.mark.parametrize(("simulator", "actions"), [(GuessNumber(), ["5", "7", "9"]), (GridWalk(), ["up", "left", "down"])])
def test_equal_seeds_play_equal_games_and_a_saved_state_goes_on(simulator: Any, actions: list[str]) -> None:
    first = play(simulator, actions)
    assert first == play(simulator, actions)
    simulator.reset(seed=3, options=None)
    simulator.step(actions[0])
    state = simulator.get_state()
    play(simulator, actions, seed=8)
    simulator.load_state(state)
    assert [simulator.step(action)[:4] for action in actions[1:]] == first[2:]


@pytest.mark.parametrize("simulator", [GuessNumber(), GridWalk()])
def test_a_step_needs_a_beginning(simulator: Any) -> None:
    with pytest.raises(EnvError, match="step before reset"):
        simulator.step("1")


def test_an_image_shows_walker_and_goal_and_survives_the_pipe() -> None:
    grid = GridWalk(size=3, images=True)
    seen, _ = grid.reset(seed=1, options=None)
    assert isinstance(seen, ImageObservation) and seen.pixels.shape == (3 * PIXELS, 3 * PIXELS, 3)
    assert seen.pixels[..., 0].sum() == seen.pixels[..., 1].sum() == 255 * PIXELS**2
    back = unpacked(packed(seen))
    assert isinstance(back, ImageObservation) and np.array_equal(back.pixels, seen.pixels) and back.text == seen.text
    with pytest.raises(EnvError, match="no observation"):
        unpacked(["x"])


def test_what_has_no_json_form_stays_out_of_info() -> None:
    assert plain({"a": 1, 2: "b", "c": object(), "d": np.ones(2)}).keys() == {"a", "2", "d"}


def test_a_simulator_becomes_asynchronous() -> None:
    async def use() -> list[Any]:
        environment: StepEnvironment = LocalEnvironment(GridWalk(), timeout_s=60.0)
        await environment.reset(seed=1)
        state = await environment.get_state()
        steps = [await environment.step(move) for move in MOVES]
        await environment.load_state(state)
        again = [await environment.step(move) for move in MOVES]
        await environment.close()
        await environment.close()
        with pytest.raises(EnvError, match="closed"):
            await environment.step("up")
        return [steps, again]

    steps, again = asyncio.run(use())
    assert steps == again


def test_what_a_simulator_lacks_is_said() -> None:
    class Bare:
        def reset(self, *, seed: Any, options: Any) -> Any:
            return 5, {}

        def close(self) -> None:
            pass

    async def use() -> None:
        environment = LocalEnvironment(Bare(), timeout_s=60.0)
        with pytest.raises(EnvError, match="Bare has no get_state"):
            await environment.get_state()
        with pytest.raises(EnvError, match="an observation is text or an ImageObservation, not a int"):
            await environment.reset()

    asyncio.run(use())


def gymnasium_environment(**settings: Any) -> Any:
    pytest.importorskip("gymnasium")
    from rlhub.envs.gymnasium import GymnasiumEnvironment

    return GymnasiumEnvironment(**settings)


def test_gymnasium_reads_words_and_numbers() -> None:
    lake = gymnasium_environment(
        id="FrozenLake-v1", make_kwargs={"is_slippery": False}, actions=["left", "down", "right", "up"], describe="A lake."
    )
    assert play(lake, ["down", "go Down!", "right"]) == [
        "A lake.\n0",
        ("4", 0, False, False),
        ("8", 0, False, False),
        ("9", 0, False, False),
    ]
    assert lake.step("swim") == ("Say one of left, down, right, up.", 0.0, False, False, {"invalid_action": True})
    assert [lake.step(move)[1:3] for move in ("down", "right", "right")][-1] == (1.0, True)
    numbered = gymnasium_environment(id="CartPole-v1", invalid_reward=-1.0)
    numbered.reset(seed=1, options=None)
    assert numbered.step("I choose 1.")[1] == 1.0
    assert numbered.step("7")[:2] == ("There is no action 7; actions are 0 to 1.", -1.0)
    with pytest.raises(EnvError, match="3 names of actions"):
        gymnasium_environment(id="CartPole-v1", actions=["a", "b", "c"])


def test_gymnasium_goes_on_from_a_state() -> None:
    pole = gymnasium_environment(id="CartPole-v1")
    pole.reset(seed=5, options=None)
    pole.step("1")
    state = pole.get_state()
    rest = [pole.step(action)[:4] for action in ("0", "1", "1")]
    pole.reset(seed=9, options=None)
    pole.load_state(state)
    assert [pole.step(action)[:4] for action in ("0", "1", "1")] == rest
    box = gymnasium_environment(id="Pendulum-v1")
    box.reset(seed=1, options=None)
    assert box.step("[0.5]")[1] < 0 and "JSON" in box.step("left")[0] and "outside" in box.step("[9]")[0]
