"""Episodes of a vision-language-action policy in simulators: chunks of actions in lock-step, and their calls as training rows.

A call of the policy reads the pictures and the instruction of one environment and chooses a chunk of actions.  An environment
whose episode has ended begins the next one that waits.  With several stages the environments of a rank are parts that take turns:
one is simulated while the policy chooses the actions of another.  Episodes depend on their own seeds alone, so their order, the
number of environments and of stages change none of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhub.config.sections.env import EnvConfig
from rlhub.config.sections.vla import VLAConfig
from rlhub.data.episodes import ActionTokenizer, prompts_with_images
from rlhub.data.tokenizing import Tokenizer, left_padded, pad_id
from rlhub.engines.rollout.base import FINISH_CODES, Completion, GenerationRequest, RolloutEngine, SamplingParams
from rlhub.envs.vector.base import ChunkResult, Obs, VectorSpec
from rlhub.envs.vector.manager import EnvManager, EnvManagerOptions
from rlhub.errors import ConfigError, EngineError
from rlhub.models.vla.policy import PIXEL_VALUES
from rlhub.registry import knobs_for
from rlhub.rewards.srpo import EMBEDDING, TASK, Encoder
from rlhub.utils.seeding import sample_seed, sample_seeds


@dataclass(slots=True, kw_only=True)
class EpisodeStart:
    """The start of an episode.  scene: the number of its scene in the batch, and sample: its number among the scene's episodes.

    seed: of the environment.  initial: the fixed initial state that it begins with, -1 for one drawn from the seed.
    policy_seed: of the actions.
    """

    scene: int
    sample: int
    seed: int
    initial: int
    policy_seed: int


@dataclass(slots=True, kw_only=True)
class PolicyCall:
    """One call of the policy, and what its actions did.

    images: (cameras, 3, height, width) uint8.  images_after: those after the last call of an episode.
    executed: the number of its actions that were executed.  reward: their sum.
    next_value: the return that the policy predicts after the call, 0 where the episode terminated.
    lost: the environment ended with its process, and nothing of the call counts.
    """

    start: EpisodeStart
    number: int
    prompt_ids: list[int]
    images: Tensor
    completion: Completion
    executed: int = 0
    reward: float = 0.0
    next_value: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool = False
    lost: bool = False
    images_after: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class _Active:
    """An episode in an environment, and what the policy reads next.  ended: of what it reads, only the value is wanted."""

    start: EpisodeStart
    place: int
    instruction: str = ""
    images: Tensor = field(default_factory=lambda: torch.empty(0))
    calls: list[PolicyCall] = field(default_factory=list)
    ended: bool = False

    def observe(self, obs: Obs, row: int) -> None:
        """Reads the pictures (cameras, height, width, 3) and the instruction of a row."""
        self.images = torch.from_numpy(obs.images[row]).permute(0, 3, 1, 2).contiguous()
        self.instruction = obs.instruction[row] or self.instruction


class SubmittedEnv(Protocol):
    """Environments in lock-step whose calls are submitted, executed one after the other, and waited for later: an EnvManager."""

    options: EnvManagerOptions
    num_envs: int

    @property
    def spec(self) -> VectorSpec: ...

    def submit_reset(self, ids: Sequence[int], *, seeds: Sequence[int], initial: Sequence[int] | None) -> Future[Obs]: ...

    def submit_chunk(self, actions: NDArray[np.float32]) -> Future[ChunkResult]: ...

    def close(self) -> None: ...


class EpisodeRunner:
    """Runs episodes of the engine's policy in environments of its own.  Their processes start with the first episodes."""

    def __init__(
        self,
        engine: RolloutEngine,
        config: EnvConfig,
        vla: VLAConfig,
        tokenizer: Tokenizer,
        make_env: Callable[[EnvManagerOptions], SubmittedEnv] = EnvManager,
    ) -> None:
        """config: with num_envs, of this rank, over all stages.  make_env: is called for each stage, in order."""
        self.engine, self.vla, self.tokenizer = engine, vla, tokenizer
        self.by_success = config.reward != "simulator"
        self.actions, self.pad_id = ActionTokenizer(vla), pad_id(tokenizer)
        self.stages = [_Stage(make_env(options), self) for options in stage_options(config, vla)]
        self._prompts: dict[str, list[int]] = {}

    def run(self, starts: Sequence[EpisodeStart], sampling: SamplingParams) -> list[PolicyCall]:
        """Returns the calls of all episodes, ordered by scene, sample and number."""
        for index, stage in enumerate(self.stages):
            stage.begin(starts[index :: len(self.stages)])
        turns = deque(self.stages)
        while turns:
            stage = turns.popleft()
            waiting = stage.observed()
            requests = [self._request(episode) for episode in waiting]
            if stage.act(waiting, self.engine.generate(requests, sampling) if requests else []):
                turns.append(stage)
        episodes = [episode for stage in self.stages for episode in stage.begun]
        episodes.sort(key=lambda episode: (episode.start.scene, episode.start.sample))
        return [call for episode in episodes for call in episode.calls]

    def _request(self, episode: _Active) -> GenerationRequest:
        seed = sample_seed(episode.start.policy_seed, len(episode.calls), 0)
        return GenerationRequest(prompt_ids=self.prompt(episode), seed=seed, images=episode.images)

    def prompt(self, episode: _Active) -> list[int]:
        """Returns the tokens of the episode's instruction and of the places of its pictures."""
        if episode.instruction not in self._prompts:
            found = prompts_with_images(self.tokenizer, [episode.instruction], len(episode.images), self.vla)
            self._prompts[episode.instruction] = found[0]
        return self._prompts[episode.instruction]

    def close(self) -> None:
        """Ends all processes.  Idempotent."""
        for stage in self.stages:
            stage.env.close()


def starts_of(scenes: Mapping[str, Tensor], *, samples: int, run_seed: int) -> list[EpisodeStart]:
    """Returns the starts of `samples` episodes from each scene.

    scenes: uid, the number of the scene in the batch; ordinal, its number in the run; seed and initial, as EpisodeStart has them;
    each (rows,) int64.
    """
    columns = (scenes[name].tolist() for name in ("uid", "ordinal", "seed", "initial"))
    return [
        EpisodeStart(scene=scene, sample=sample, seed=seed, initial=initial, policy_seed=policy_seed)
        for scene, ordinal, seed, initial in zip(*columns, strict=True)
        for sample, policy_seed in enumerate(sample_seeds(run_seed, ordinal, samples))
    ]


def stage_options(config: EnvConfig, vla: VLAConfig) -> list[EnvManagerOptions]:
    """Returns the environments of each stage: equal parts of config.num_envs, with equal parts of the processes.

    Raises ConfigError for settings of config.manager that do not exist, and for fewer environments than stages.
    """
    num_envs = config.num_envs
    assert config.name is not None and num_envs is not None, "the caller has asked, and it was derived"
    if num_envs < config.stages:
        raise ConfigError(f"env.stages={config.stages} are more than a rank's {num_envs} environments; set env.stages lower")
    named = {"name": config.name, "settings": config.settings, "num_envs": num_envs, "chunk": vla.chunk, "auto_reset": False}
    if taken := sorted(named.keys() & config.manager):
        raise ConfigError(f"env.manager.{taken[0]} follows from other settings (env.name, env.num_envs, model.vla.chunk)")
    whole: Any = knobs_for(EnvManagerOptions, EnvConfig(), {**config.manager, **named}, where="env.manager")
    sizes = [num_envs * (index + 1) // config.stages - num_envs * index // config.stages for index in range(config.stages)]
    processes = max(whole.processes // config.stages, 1)
    return [dataclasses.replace(whole, num_envs=size, processes=min(processes, size)) for size in sizes]


class _Stage:
    """A part of a rank's environments, and the episodes in them."""

    def __init__(self, env: SubmittedEnv, runner: EpisodeRunner) -> None:
        self.env, self.runner = env, runner
        self.begun: list[_Active] = []
        self._waiting: deque[EpisodeStart] = deque()
        self._free: list[int] = []
        self._new: tuple[list[_Active], Future[Obs]] | None = None
        self._acting: list[_Active] = []
        self._chunk: Future[ChunkResult] | None = None

    def begin(self, starts: Sequence[EpisodeStart]) -> None:
        """Begins the first of the episodes, as many as there are environments, without waiting for them."""
        self.begun, self._waiting, self._free = [], deque(starts), list(range(self.env.num_envs))
        self._chunk = None
        self._reset()

    def _reset(self) -> None:
        """Begins episodes that wait, in the free environments."""
        self._new = None
        count = min(len(self._free), len(self._waiting))
        if not count:
            return
        places, self._free = self._free[:count], self._free[count:]
        new = [_Active(start=self._waiting.popleft(), place=place) for place in places]
        seeds, fixed = [episode.start.seed for episode in new], [episode.start.initial for episode in new]
        known = self.env.spec.initial_states
        if max(fixed) >= known > 0:
            raise EngineError(f"{self.env.options.name} has the initial states 0 to {known - 1}, and {max(fixed)} is asked for")
        self.begun += new
        initial = fixed if known and fixed[0] >= 0 else None
        self._new = new, self.env.submit_reset(places, seeds=seeds, initial=initial)

    def observed(self) -> list[_Active]:
        """Waits for the environments, and returns the episodes of which the policy reads something next."""
        asked: list[_Active] = []
        if self._chunk is not None:
            asked = self._recorded(self._chunk.result())
            self._reset()
        if self._new is not None:
            new, future = self._new
            obs = future.result()
            for row, episode in enumerate(new):
                episode.observe(obs, row)
            asked += new
            self._new = None
        return asked

    def act(self, asked: Sequence[_Active], answers: Sequence[Completion]) -> bool:
        """Sends the chosen actions of running episodes to the environments.  Returns False where all episodes are over."""
        spec, actions = self.env.spec, self.runner.actions
        chosen = np.zeros((self.env.num_envs, self.runner.vla.chunk, spec.action_dim), np.float32)
        running = [(episode, answer) for episode, answer in zip(asked, answers, strict=True) if not episode.ended]
        for episode, answer in zip(asked, answers, strict=True):
            if episode.calls:
                episode.calls[-1].next_value = answer.value or 0.0
        for episode, answer in running:
            prompt, number = self.runner.prompt(episode), len(episode.calls)
            episode.calls.append(
                PolicyCall(start=episode.start, number=number, prompt_ids=prompt, images=episode.images, completion=answer)
            )
            chosen[episode.place] = actions.decode(answer.token_ids)
        self._acting = [episode for episode, _ in running]
        self._chunk = self.env.submit_chunk(chosen) if running else None
        return bool(running) or bool(self._waiting)

    def _recorded(self, result: ChunkResult) -> list[_Active]:
        """Writes what the last calls did.  Returns the episodes that go on, and those whose last value is wanted."""
        ended_rows = {int(place): row for row, place in enumerate(np.flatnonzero(result.ended))}
        asked = []
        for episode in self._acting:
            call, place = episode.calls[-1], episode.place
            call.lost = bool(result.lost[place])
            call.executed, call.reward = int(result.valid[place].sum()), float(result.reward[place].sum())
            call.terminated, call.truncated = bool(result.terminated[place].any()), bool(result.truncated[place].any())
            call.success = bool(result.success[place])
            if self.runner.by_success:
                call.reward, call.terminated = float(call.success), call.terminated or call.truncated
            if place in ended_rows and not call.lost:
                episode.observe(result.final_obs, ended_rows[place])
                call.images_after = episode.images
            if call.lost or call.terminated or (call.truncated and not self.runner.vla.value_head):
                self._free.append(place)
                continue
            if call.truncated:
                self._free.append(place)
                episode.ended = True
            elif call.executed == 0:  # while other environments of its process began again: the call is asked for once more
                episode.calls.pop()
            else:
                episode.observe(result.obs, place)
            asked.append(episode)
        self._free.sort()
        return asked


def training_rows(
    calls: Sequence[PolicyCall], vla: VLAConfig, pad: int, *, samples: int, widest: Callable[[int], int]
) -> dict[str, Tensor]:
    """Returns the calls as columns of a batch.

    input_ids, attention_mask (rows, prompt + response); responses, response_mask (1 for tokens of executed actions) and
    rollout_log_probs (rows, response); pixel_values (rows, cameras, 3, height, width) uint8.  With one number a row:
    prompt_length, response_length, finish_reason, uid (the scene), episode, call, scores (the rewards of the call's actions),
    valid, next_values, terminated, success and lost.

    samples: episodes of a scene.  widest: turns this rank's longest prompt into that of all ranks.
    """
    prompts = left_padded([call.prompt_ids for call in calls], pad)
    attended = left_padded([[1] * len(call.prompt_ids) for call in calls], 0)
    wider = ((0, 0), (widest(prompts.shape[1]) - prompts.shape[1], 0))
    responses = np.asarray([call.completion.token_ids for call in calls], np.int64)
    executed = np.asarray([[call.executed * vla.action_dim] for call in calls])
    columns = {
        "input_ids": np.concatenate([np.pad(prompts, wider, constant_values=pad), responses], 1),
        "attention_mask": np.concatenate([np.pad(attended, wider), np.ones_like(responses)], 1),
        "responses": responses,
        "response_mask": (np.arange(responses.shape[1]) < executed).astype(np.int64),
        "prompt_length": attended.sum(1),
        "response_length": np.full(len(calls), responses.shape[1]),
        "finish_reason": np.asarray([FINISH_CODES[call.completion.finish_reason] for call in calls]),
    }
    if all(call.completion.log_probs for call in calls):
        columns["rollout_log_probs"] = np.asarray([call.completion.log_probs for call in calls], np.float32)
    tensors = {name: torch.from_numpy(column) for name, column in (columns | outcomes(calls, samples)).items()}
    return tensors | {PIXEL_VALUES: torch.stack([call.images for call in calls])}


def embedded(calls: Sequence[PolicyCall], encode: Encoder, task: str) -> dict[str, Tensor]:
    """Returns the columns of EMBEDDED, in which the last call of an episode has its embedding, and other calls zeros.

    calls: of whole episodes, in order.  task: `scene` or `instruction`, by which episodes have the same task.
    """
    films = [[*group] for _, group in itertools.groupby(calls, lambda call: (call.start.scene, call.start.sample))]
    pictures = [[*(call.images for call in film), film[-1].images_after] for film in films]
    found = encode([torch.stack([images for images in film if images is not None]) for film in pictures])
    column = found.new_zeros(len(calls), found.shape[1])
    column[torch.tensor([len(film) for film in films]).cumsum(0) - 1] = found
    return {EMBEDDING: column, TASK: torch.tensor([_task_of(call, task) for call in calls])}


def _task_of(call: PolicyCall, task: str) -> int:
    """Returns a number that is the same in every process and step: of the scene, or of the instruction with its places."""
    if task == "scene":
        return call.start.initial if call.start.initial >= 0 else call.start.seed
    digest = hashlib.blake2b(str(call.prompt_ids).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # it must fit int64


def outcomes(calls: Sequence[PolicyCall], samples: int) -> dict[str, NDArray[Any]]:
    """Returns what became of each call, one number a row; see `training_rows`."""
    return {
        "uid": np.asarray([call.start.scene for call in calls]),
        "episode": np.asarray([call.start.scene * samples + call.start.sample for call in calls]),
        "call": np.asarray([call.number for call in calls]),
        "scores": np.asarray([call.reward for call in calls], np.float32),
        "valid": np.ones(len(calls), np.bool_),
        "next_values": np.asarray([call.next_value for call in calls], np.float32),
        "terminated": np.asarray([call.terminated for call in calls]),
        "success": np.asarray([call.success for call in calls]),
        "lost": np.asarray([call.lost for call in calls]),
    }
