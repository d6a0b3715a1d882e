"""Episodes in lock-step: which calls they have, what their rows say, and what a lost environment costs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhub.config.sections.env import EnvConfig
from rlhub.config.sections.vla import VLAConfig
from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.engines.rollout.embodied import (
    EpisodeRunner,
    EpisodeStart,
    PolicyCall,
    embedded,
    stage_options,
    starts_of,
    training_rows,
)
from rlhub.envs.vector.base import ChunkResult, Obs
from rlhub.envs.vector.lockstep import make_vector_env
from rlhub.envs.vector.manager import EnvManagerOptions
from rlhub.errors import ConfigError, EngineError

NAME = "tests.support.vector_simulators:Countdown"
CHUNK, ACTION_DIM, BINS, FIRST_BIN = 2, 2, 5, 20
VLA = VLAConfig(chunk=CHUNK, action_dim=ACTION_DIM, bins=BINS, first_bin_id=FIRST_BIN, image_token_id=3, tokens_per_image=2)
WITH_VALUES = replace(VLA, value_head=True)
SAMPLING = SamplingParams(max_new_tokens=CHUNK * ACTION_DIM)
LIMIT = 4


class Words:
    """A tokenizer of two instructions of different lengths."""

    pad_token_id = eos_token_id = 0

    def __call__(self, texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
        known = {"red": [5], "blue": [6, 7]}
        return {"input_ids": [known[text] for text in texts]}


@dataclass
class Engine:
    """Chooses actions by the request's seed alone, and predicts a value from the picture alone."""

    requests: list[GenerationRequest] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Completion]:
        self.events.append("generate")
        self.requests += requests
        return [self._answer(request) for request in requests]

    def _answer(self, request: GenerationRequest) -> Completion:
        noise = random.Random(request.seed)
        tokens = [FIRST_BIN + noise.randrange(BINS) for _ in range(CHUNK * ACTION_DIM)]
        assert request.images is not None
        return Completion(
            token_ids=tokens, log_probs=[-noise.random() for _ in tokens], finish_reason="length", value=value_of(request.images)
        )


def value_of(images: Tensor) -> float:
    """images: (1, 3, 2, 1), with the seed and the number of executed actions."""
    return 1000.0 * int(images[0, 0, 1, 0]) + int(images[0, 0, 0, 0])


class Here:
    """Stands for an EnvManager, in this process, and notes what it is asked for.

    lost: by the number of a chunk, the environments that are lost in it.  idle: the chunks in which nothing is executed.
    """

    lost: Mapping[int, Sequence[int]] = {}
    idle: Sequence[int] = ()
    events: list[str] = []
    made: list[Here] = []

    def __init__(self, options: EnvManagerOptions) -> None:
        self.options, self.num_envs, self.name = options, options.num_envs, len(Here.made)
        self._inner = make_vector_env(options.name, options.settings, options.num_envs, chunk=options.chunk, auto_reset=False)
        self.spec, self.seeds, self.chunks, self.closed = self._inner.spec, list[int](), 0, False
        Here.made.append(self)

    def submit_reset(self, ids: Sequence[int], *, seeds: Sequence[int], initial: Sequence[int] | None = None) -> Any:
        self.seeds += seeds
        return Answered(self._inner.reset(ids, seeds=seeds, initial=initial), f"begun {self.name}")

    def submit_chunk(self, actions: np.ndarray) -> Any:
        number, self.chunks = self.chunks, self.chunks + 1
        Here.events.append(f"submit {self.name}")
        result = nothing(self.num_envs) if number in Here.idle else self._inner.chunk_step(actions)
        lost = list(Here.lost.get(number, ()))
        result.final_obs.images = result.final_obs.images[[row not in lost for row in np.flatnonzero(result.ended)]]
        for column in (result.reward, result.terminated, result.truncated, result.valid, result.success):
            column[lost] = 0
        result.lost[lost] = True
        return Answered(result, f"wait {self.name}")

    def close(self) -> None:
        self.closed = True


@dataclass
class Answered:
    """A future that has its result, and notes when somebody waits for it."""

    value: Any
    event: str

    def result(self) -> Any:
        Here.events.append(self.event)
        return self.value


def nothing(num_envs: int) -> ChunkResult:
    """The result of a chunk in which no action is executed."""
    no = np.zeros((num_envs, CHUNK), np.bool_)
    empty = Obs(images=np.zeros((0, 1, 2, 1, 3), np.uint8), state=np.zeros((0, 0)), instruction=[], seed=np.zeros(0, np.int64))
    steps: dict[str, Any] = {"reward": no * 0.0, "terminated": no.copy(), "truncated": no.copy(), "valid": no.copy()}
    flags: dict[str, Any] = {"success": no[:, 0].copy(), "lost": no[:, 0].copy()}
    return ChunkResult(obs=empty, final_obs=empty, **steps, **flags, info=[{}] * num_envs, num_rendered=0)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    Here.lost, Here.idle, Here.events, Here.made = {}, (), [], []
    yield


def starts(count: int, samples: int = 2, *, fixed: bool = False) -> list[EpisodeStart]:
    scenes = torch.arange(count)
    columns = {"uid": scenes, "ordinal": 100 + scenes, "seed": 3 * scenes + 1, "initial": scenes if fixed else scenes * 0 - 1}
    return starts_of(columns, samples=samples, run_seed=7)


def runner(
    num_envs: int = 3, stages: int = 1, vla: VLAConfig = WITH_VALUES, engine: Any = None, **settings: Any
) -> EpisodeRunner:
    config = EnvConfig(name=NAME, num_envs=num_envs, stages=stages, **settings)
    return EpisodeRunner(engine or Engine(), config, vla, Words(), Here)  # type: ignore[arg-type]


def facts(calls: Sequence[PolicyCall]) -> list[Any]:
    after = [None if call.images_after is None else call.images_after.tolist() for call in calls]
    pictures = zip(calls, after, strict=True)
    return [replace(call, images=call.images.tolist(), images_after=last) for call, last in pictures]  # type: ignore[arg-type]


def lengths(calls: Sequence[PolicyCall]) -> dict[tuple[int, int], int]:
    """The executed actions of each episode."""
    found: dict[tuple[int, int], int] = {}
    for call in calls:
        key = call.start.scene, call.start.sample
        found[key] = found.get(key, 0) + call.executed
    return found


# --- which calls there are ---------------------------------------------------------------------------------------------------


def test_calls_are_ordered_by_scene_sample_and_number() -> None:
    given = starts(5)
    random.Random(1).shuffle(given)
    calls = runner(num_envs=2).run(given, SAMPLING)
    order = [(call.start.scene, call.start.sample, call.number) for call in calls]
    assert order == sorted(order) and {one[:2] for one in order} == {(scene, sample) for scene in range(5) for sample in range(2)}
    assert lengths(calls) == {(scene, sample): min((3 * scene + 1) % 7 + 1, LIMIT) for scene in range(5) for sample in range(2)}


@pytest.mark.parametrize(("num_envs", "stages"), [(1, 1), (2, 1), (7, 1), (12, 1), (40, 1), (2, 2), (5, 2), (24, 2), (5, 3)])
def test_episodes_do_not_depend_on_environments_stages_or_waves(num_envs: int, stages: int) -> None:
    wanted = facts(runner(num_envs=12).run(starts(6), SAMPLING))
    assert facts(runner(num_envs, stages).run(starts(6), SAMPLING)) == wanted


def test_episodes_of_several_runs_do_not_depend_on_each_other() -> None:
    one = runner(num_envs=4, stages=2)
    first, second = starts(3), [replace(start, scene=start.scene + 9) for start in starts(5)[4:]]
    assert facts(one.run(first, SAMPLING)) == facts(runner().run(first, SAMPLING))
    assert facts(one.run(second, SAMPLING)) == facts(runner().run(second, SAMPLING))
    assert one.run([], SAMPLING) == []


def test_samples_of_a_scene_share_its_environment_and_no_noise() -> None:
    calls = runner().run(starts(4, samples=3), SAMPLING)
    firsts = [call for call in calls if call.number == 0]
    for scene in range(4):
        same = [call for call in firsts if call.start.scene == scene]
        assert len({call.images.numpy().tobytes() for call in same}) == 1 and len({call.start.seed for call in same}) == 1
    assert len({tuple(call.completion.log_probs) for call in calls}) == len(calls), "each call has noise of its own"


def test_environments_without_an_episode_wait() -> None:
    calls = runner(num_envs=9).run(starts(2, samples=1), SAMPLING)
    assert [call.start.scene for call in calls if call.number == 0] == [0, 1] and Here.made[0].seeds == [1, 4]
    assert facts(calls) == facts(runner(num_envs=2).run(starts(2, samples=1), SAMPLING))


def test_fixed_initial_states_are_begun() -> None:
    calls = runner(num_envs=2).run(starts(7, samples=1, fixed=True), SAMPLING)
    assert lengths(calls) == {(scene, 0): min(scene + 1, LIMIT) for scene in range(7)}
    with pytest.raises(EngineError, match="has the initial states 0 to 6, and 7 is asked for"):
        runner(num_envs=8).run(starts(8, samples=1, fixed=True), SAMPLING)


def test_a_policy_chooses_while_the_other_stage_is_simulated() -> None:
    """Between a chunk's beginning and the wait for it, the other stage's actions are chosen."""
    for stages in (1, 2):
        Here.events, Here.made = [], []
        runner(2 * stages, stages, engine=Engine(events=Here.events)).run(starts(8, samples=1, fixed=False), SAMPLING)
        chosen = []
        for place, event in enumerate(Here.events):
            if event.startswith("submit"):
                until = Here.events.index(f"wait {event.split()[1]}", place)
                chosen.append("generate" in Here.events[place:until])
        assert any(chosen) == (stages == 2) and (stages == 1 or all(chosen[:4]))


# --- the numbers of a call ---------------------------------------------------------------------------------------------------


def test_actions_after_the_end_are_neither_executed_nor_trained() -> None:
    calls = runner().run(starts(7, samples=1, fixed=True), SAMPLING)
    for scene in range(7):
        own = [call for call in calls if call.start.scene == scene]
        done = min(scene + 1, LIMIT)
        assert [call.executed for call in own] == [2] * (done // 2) + [1] * (done % 2)
        assert sum(call.reward for call in own) == sum(range(1, done + 1))
        ended, success = scene + 1 <= LIMIT, [call.success for call in own]
        assert [call.terminated for call in own] == [False] * (len(own) - 1) + [ended] == success
        assert [call.truncated for call in own] == [False] * (len(own) - 1) + [not ended]
    rows = training_rows(calls, WITH_VALUES, 0, samples=1, widest=lambda width: width)
    wanted = [[1] * (2 * call.executed) + [0] * (4 - 2 * call.executed) for call in calls]
    assert rows["response_mask"].tolist() == wanted and [1, 1, 0, 0] in wanted


def test_a_time_limit_asks_for_one_more_value_and_an_end_does_not() -> None:
    engine = Engine()
    calls = runner(engine=engine).run(starts(7, samples=1, fixed=True), SAMPLING)
    late = [call for call in calls if call.truncated]
    assert len(engine.requests) == len(calls) + len(late) and len(late) == 3
    after = {(call.start.scene, call.number): call for call in calls}
    for call in calls:
        follower = after.get((call.start.scene, call.number + 1))
        if call.terminated:
            assert call.next_value == 0.0
        elif call.truncated:
            assert call.next_value == 1000.0 * LIMIT + call.start.seed
        else:
            assert follower is not None and follower.completion.value is not None
            assert call.next_value == follower.completion.value > 0


def test_without_a_value_head_a_time_limit_asks_for_nothing() -> None:
    engine = Engine()
    calls = runner(vla=VLA, engine=engine).run(starts(7, samples=1, fixed=True), SAMPLING)
    assert len(engine.requests) == len(calls) and [call.next_value for call in calls if call.truncated] == [0.0] * 3


def test_by_success_only_the_solving_call_is_rewarded_and_a_time_limit_is_an_end() -> None:
    engine = Engine()
    calls = runner(engine=engine, reward="success").run(starts(7, samples=1, fixed=True), SAMPLING)
    assert len(engine.requests) == len(calls), "no value is asked for behind an end"
    for scene in range(7):
        own = [call for call in calls if call.start.scene == scene]
        assert [call.reward for call in own] == [0.0] * (len(own) - 1) + [float(scene + 1 <= LIMIT)]
        assert [call.terminated for call in own] == [False] * (len(own) - 1) + [True]
        assert all(call.next_value == 0.0 for call in own if call.terminated)


# --- embeddings of episodes --------------------------------------------------------------------------------------------------


def test_an_episode_is_embedded_with_the_pictures_after_it() -> None:
    calls = runner(num_envs=4).run(starts(5), SAMPLING)
    films: list[Tensor] = []

    def encode(episodes: Sequence[Tensor]) -> Tensor:
        films.extend(episodes)
        return torch.arange(1.0, len(episodes) + 1, dtype=torch.float64)[:, None].expand(-1, 3)

    found = embedded(calls, encode, "scene")
    done = [[*map(int, film[:, 0, 0, 1, 0])] for film in films]
    assert [film[:-1] for film in done] == [[*range(0, CHUNK * (len(film) - 1), CHUNK)] for film in done]
    assert [film[-1] for film in done] == [*lengths(calls).values()], "the last picture shows all executed actions"
    last = [row for row, call in enumerate(calls) if call.terminated or call.truncated]
    assert torch.equal(found["embedding"][last, 0], torch.arange(1.0, 11.0, dtype=torch.float64))
    assert found["embedding"].any(1).sum() == len(last) == 10 and found["embedding"].dtype == torch.float64
    assert found["task"].tolist() == [call.start.seed for call in calls]


def test_tasks_are_scenes_or_instructions() -> None:
    def tasks(task: str, fixed: bool = False) -> list[int]:
        calls = runner().run(starts(4, fixed=fixed), SAMPLING)
        assert {call.start.initial for call in calls} == (set(range(4)) if fixed else {-1})
        found: list[int] = embedded(calls, lambda films: torch.ones(len(films), 1), task)["task"].tolist()
        return [found[[call.start.scene for call in calls].index(scene)] for scene in range(4)]

    assert tasks("scene") == [1, 4, 7, 10] and tasks("scene", fixed=True) == [0, 1, 2, 3]
    first, second, third, fourth = tasks("instruction")
    assert first == third != second == fourth and tasks("instruction") == [first, second, third, fourth]
    assert all(0 <= number < 1 << 63 for number in (first, second))


def test_the_policy_reads_the_picture_before_its_call() -> None:
    for call in runner().run(starts(5), SAMPLING):
        assert call.images.shape == (1, 3, 2, 1) and call.images.dtype == torch.uint8
        assert call.images[0, 0].flatten().tolist() == [call.start.seed, CHUNK * call.number]
        assert call.prompt_ids == [[6, 7], [5]][call.start.seed % 2 == 0] + [3, 3]


# --- lost environments -------------------------------------------------------------------------------------------------------


def test_a_lost_environment_costs_the_calls_from_there_on() -> None:
    """The second chunk of environment 1 is lost: the call stays as a row that does not train, and the one before bootstraps from
    the value that the policy predicted for it."""
    given = [one for one in starts(7, samples=1, fixed=True) if one.scene >= 2]
    undisturbed = runner(num_envs=5).run(given, SAMPLING)
    Here.lost = {1: [1]}
    calls = runner(num_envs=5).run(given, SAMPLING)
    others = [call for call in calls if call.start.scene != 3]
    assert facts(others) == facts([call for call in undisturbed if call.start.scene != 3])
    before, lost = [call for call in calls if call.start.scene == 3]
    assert (lost.lost, lost.executed, lost.reward, lost.terminated, lost.truncated) == (True, 0, 0.0, False, False)
    assert not before.lost and before.executed == 2 and before.next_value == lost.completion.value == 2000.0 + lost.start.seed
    rows = training_rows(calls, WITH_VALUES, 0, samples=1, widest=lambda width: width)
    chosen = rows["lost"]
    assert chosen.sum() == 1 and not rows["response_mask"][chosen].any() and rows["response_mask"][~chosen][:, 0].all()
    assert rows["attention_mask"][chosen][:, -4:].all(), "what was sampled is still there to be read"


@pytest.mark.parametrize("lost", [{0: [0, 1]}, {0: [0], 1: [0], 2: [1]}])
def test_waiting_episodes_begin_in_lost_environments(lost: Mapping[int, Sequence[int]]) -> None:
    Here.lost = lost
    calls = runner(num_envs=2).run(starts(5), SAMPLING)
    gone = [(call.start.scene, call.start.sample) for call in calls if call.lost]
    assert len(gone) == sum(map(len, lost.values())) and len(lengths(calls)) == 10
    Here.lost = {}
    whole = lengths(runner(num_envs=2).run(starts(5), SAMPLING))
    assert all(count == whole[key] for key, count in lengths(calls).items() if key not in gone)


def test_a_chunk_in_which_nothing_was_executed_is_asked_for_once_more() -> None:
    """A process that was lost while environments were reset executes nothing in the next chunk."""
    wanted = facts(runner(num_envs=3).run(starts(4), SAMPLING))
    Here.idle = (0, 2, 3)
    engine = Engine()
    assert facts(runner(num_envs=3, engine=engine).run(starts(4), SAMPLING)) == wanted
    assert len(engine.requests) > len(wanted)


# --- rows --------------------------------------------------------------------------------------------------------------------


def test_rows_say_what_calls_are() -> None:
    calls = runner().run(starts(3), SAMPLING)
    rows = training_rows(calls, WITH_VALUES, 9, samples=2, widest=lambda width: width + 2)
    width = max(len(call.prompt_ids) for call in calls) + 2
    assert rows["input_ids"].shape == rows["attention_mask"].shape == (len(calls), width + 4)
    assert rows["pixel_values"].shape == (len(calls), 1, 3, 2, 1) and rows["pixel_values"].dtype == torch.uint8
    for row, call in enumerate(calls):
        pad = width - len(call.prompt_ids)
        assert rows["input_ids"][row].tolist() == [9] * pad + call.prompt_ids + call.completion.token_ids
        assert rows["attention_mask"][row].tolist() == [0] * pad + [1] * (width + 4 - pad)
        assert rows["responses"][row].tolist() == call.completion.token_ids
        assert rows["rollout_log_probs"][row].tolist() == pytest.approx(call.completion.log_probs)
        assert torch.equal(rows["pixel_values"][row], call.images)
        start = call.start
        numbers = {name: rows[name][row].item() for name in ("uid", "episode", "call", "prompt_length")}
        assert numbers == {
            "uid": start.scene,
            "episode": 2 * start.scene + start.sample,
            "call": call.number,
            "prompt_length": len(call.prompt_ids),
        }
        assert rows["scores"][row] == call.reward and rows["next_values"][row] == call.next_value
        assert bool(rows["terminated"][row]) == call.terminated and bool(rows["success"][row]) == call.success
    assert (
        bool(rows["valid"].all()) and set(rows["response_length"].tolist()) == {4} and set(rows["finish_reason"].tolist()) == {1}
    )


def test_rows_without_log_probs_have_no_column_of_them() -> None:
    calls = runner().run(starts(1), SAMPLING)
    for call in calls:
        call.completion.log_probs = []
    assert "rollout_log_probs" not in training_rows(calls, WITH_VALUES, 0, samples=2, widest=lambda width: width)


# --- settings ----------------------------------------------------------------------------------------------------------------


def test_stages_are_equal_parts_of_environments_and_processes() -> None:
    parts = stage_options(EnvConfig(name=NAME, num_envs=7, stages=2, manager={"processes": 5, "timeout_s": 3.0}), VLA)
    assert [(part.num_envs, part.processes, part.timeout_s) for part in parts] == [(3, 2, 3.0), (4, 2, 3.0)]
    assert all((part.name, part.chunk, part.auto_reset) == (NAME, CHUNK, False) for part in parts)
    (alone,) = stage_options(EnvConfig(name=NAME, num_envs=3, manager={"processes": 3}), VLA)
    assert (alone.num_envs, alone.processes) == (3, 3)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (EnvConfig(name=NAME, num_envs=1, stages=2), "env.stages=2 are more than a rank's 1 environments"),
        (EnvConfig(name=NAME, num_envs=2, manager={"num_envs": 3}), "env.manager.num_envs follows from other settings"),
        (EnvConfig(name=NAME, num_envs=2, manager={"process": 3}), "did you mean 'processes'"),
        (EnvConfig(name=NAME, num_envs=2, manager={"processes": 3}), "processes=3 must be from 1 to num_envs=2"),
    ],
)
def test_settings_that_cannot_be(config: EnvConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        stage_options(config, VLA)


def test_closing_closes_all_stages() -> None:
    one = runner(num_envs=4, stages=2)
    one.run(starts(2), SAMPLING)
    one.close()
    assert [env.closed for env in Here.made] == [True, True]
