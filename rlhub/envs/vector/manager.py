"""EnvManager: environments in lock-step, spread over killable child processes.

A process that dies, hangs or exceeds its memory costs the episodes of its own environments: their rows are invalid and `lost`,
and another process begins new episodes within the same call, or with auto_reset=False waits for `reset`.  The others do not
notice.  `offload` saves the states and ends all processes; the next call starts them again.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import weakref
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rlhub.envs.base import EnvError, EnvironmentLimits
from rlhub.envs.process import EnvironmentProcess
from rlhub.envs.registry import environment_target
from rlhub.envs.vector.base import ChunkResult, Obs, Observed, VectorEnv, VectorSpec, next_seed
from rlhub.envs.vector.lockstep import Buffers, Texts, result_of, rows_of
from rlhub.envs.vector.segment import buffers_in, segment_bytes
from rlhub.errors import DeadlineError
from rlhub.utils.aio.loop_thread import LoopThread
from rlhub.utils.children.access import Access
from rlhub.utils.children.launch import AffinityKind, Launch, cpus_of_processes, read_topology
from rlhub.utils.shared_segments import new_segment_path, open_segment

logger = logging.getLogger(__name__)
MAX_LOSSES = 3  # in a row of one process, without a chunk between: its environment cannot run
GIB = 2**30


@dataclass(slots=True, kw_only=True, frozen=True)
class EnvManagerOptions:
    """The environments of a manager and how they run.

    name: registered, `module:name` or `path/to/file.py:name`; called with `settings`, it builds a Simulator or a VectorEnv.
    num_envs: environments of all processes together.  processes: child processes, each of which has an equal share of them.
    chunk: the largest number of actions of one call, 0: the environment's own.  auto_reset: an ended episode is followed by the
    next one; otherwise its environment waits for `reset`, and its rows are invalid.

    timeout_s: time limit of a chunk in a process, after which it is replaced.  start_timeout_s: time limit of resets and of
    loading states; building a process's environments may take as long, or 120 s if that is more.  memory_gb: limit of one
    process; memory_kind: what it counts (utils/children/launch.py).  python: interpreter of a Python environment with the
    simulator's packages, "" for this one.  variables: environment variables of the processes.  env: names of variables that they
    receive although these look like secrets.

    affinity: the CPUs of each process.  none: all.  cores: a core of its own while there are enough.  numa: those of one memory
    node.  gpus: devices on which the processes render, in turn.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    num_envs: int
    processes: int = 1
    chunk: int = 0
    auto_reset: bool = True
    timeout_s: float = 60.0
    start_timeout_s: float = 120.0
    memory_gb: float = 8.0
    memory_kind: Literal["address_space", "data"] = "data"
    python: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    env: tuple[str, ...] = ()
    affinity: AffinityKind = "none"
    gpus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.processes <= self.num_envs:
            raise ValueError(f"processes={self.processes} must be from 1 to num_envs={self.num_envs}: each has an environment")

    def launches(self) -> list[Launch]:
        """Returns how each process is started."""
        cpus = cpus_of_processes(self.affinity, self.processes, read_topology())
        return [self._launch(number, own) for number, own in enumerate(cpus)]

    def _launch(self, number: int, cpus: tuple[int, ...]) -> Launch:
        variables = dict(self.variables)
        if self.gpus:
            gpu = str(self.gpus[number % len(self.gpus)])
            variables = {"CUDA_VISIBLE_DEVICES": gpu, "MUJOCO_EGL_DEVICE_ID": gpu} | variables
        return Launch(python=self.python, variables=variables, cpus=cpus, memory_kind=self.memory_kind)


@dataclass(slots=True, eq=False)
class _Group:
    """The environments first..stop of one process.  process: None while it does not run.  buffers: in the memory that is shared
    with it.  seed: of the running episodes, -1 before the first reset.  instruction: theirs.  saved: their states, while they are
    offloaded.  unreported: rows whose episodes were lost while others were reset; the next chunk reports them."""

    first: int
    stop: int
    launch: Launch
    seed: np.ndarray
    process: EnvironmentProcess | None = None
    buffers: Buffers | None = None
    has_frames: bool = False
    instruction: list[str] = field(default_factory=list)
    unreported: list[int] = field(default_factory=list)
    saved: dict[int, bytes] = field(default_factory=dict)
    num_losses: int = 0

    @property
    def size(self) -> int:
        return self.stop - self.first

    @property
    def rows(self) -> slice:
        return slice(self.first, self.stop)

    def note(self, ids: Sequence[int], instruction: Sequence[str]) -> None:
        """Records the instructions of episodes that begin."""
        self.instruction = self.instruction or [""] * self.size
        for number, text in zip(ids, instruction, strict=True):
            self.instruction[number] = text

    def texts_after(self, lost: Sequence[int], why: str) -> Texts:
        """Returns the texts of a chunk in which these rows were lost and nothing was executed."""
        info = [{"lost": why} if number in lost else {} for number in range(self.size)]
        return Texts(instruction=self.instruction or [""] * self.size, final_instruction=[], info=info, num_rendered=len(lost))

    def local(self, ids: Sequence[int]) -> list[int]:
        """Returns those of the manager's ids that belong to this group, as its own numbers."""
        return [number - self.first for number in ids if self.first <= number < self.stop]


class EnvManager(VectorEnv):
    """A VectorEnv over child processes.  Processes start at the first use.  Calls are executed one after the other, in the order
    of their submission; any thread may call."""

    def __init__(self, options: EnvManagerOptions) -> None:
        self.options, self.num_envs = options, options.num_envs
        bounds = [options.num_envs * number // options.processes for number in range(options.processes + 1)]
        self._groups = [
            _Group(first, stop, launch, np.full(stop - first, -1, np.int64))
            for first, stop, launch in zip(bounds[:-1], bounds[1:], options.launches(), strict=True)
        ]
        self._making = {"kind": "vector", "target": environment_target(options.name), "settings": dict(options.settings)}
        self._making["options"] = {"chunk": options.chunk, "auto_reset": options.auto_reset}
        self._limits = EnvironmentLimits(
            reset_timeout_s=options.start_timeout_s, step_timeout_s=options.timeout_s, memory_gb=options.memory_gb
        )
        self._access = Access(setting="env", env=options.env)
        self._spec: VectorSpec | None = None
        self._order = asyncio.Lock()
        self._closed = False
        self.num_replaced = 0
        self._finalizer = weakref.finalize(self, _kill_all, self._groups)

    @property
    def spec(self) -> VectorSpec:  # type: ignore[override]  # the processes know it
        """Returns the environment's spec; starts the processes if none has run yet."""
        if self._spec is None:
            self.onload()
        assert self._spec is not None
        return self._spec

    @property
    def num_alive(self) -> int:
        """Returns the number of running processes."""
        return sum(group.process is not None and not group.process.dead for group in self._groups)

    def process_ids(self) -> list[int]:
        """Returns the numbers of the running processes."""
        return [group.process.host_pid() for group in self._groups if group.process is not None and not group.process.dead]

    def reset(self, ids: Sequence[int] | None = None, *, seeds: Sequence[int], initial: Sequence[int] | None = None) -> Obs:
        return self.submit_reset(ids, seeds=seeds, initial=initial).result()

    def submit_reset(
        self, ids: Sequence[int] | None = None, *, seeds: Sequence[int], initial: Sequence[int] | None = None
    ) -> Future[Obs]:
        """Does the same as `reset` without waiting."""
        chosen = self.checked_ids(ids, seeds=seeds, initial=initial)
        return self._submit(
            self._reset(chosen, [int(seed) for seed in seeds], None if initial is None else [int(one) for one in initial])
        )

    def chunk_step(self, actions: np.ndarray, obs: Observed = "last") -> ChunkResult:
        return self.submit_chunk(actions, obs).result()

    def submit_chunk(self, actions: np.ndarray, obs: Observed = "last") -> Future[ChunkResult]:
        """Does the same as `chunk_step` without waiting."""
        return self._submit(self._chunk_step(self.checked_actions(actions), obs))

    def get_state(self, ids: Sequence[int] | None = None) -> list[bytes]:
        found: list[bytes] = self._submit(self._get_state(self.checked_ids(ids))).result()
        return found

    def load_state(self, ids: Sequence[int] | None, states: Sequence[bytes]) -> Obs:
        chosen = self.checked_ids(ids, states=states)
        loaded: Obs = self._submit(self._load_state(chosen, list(states))).result()
        return loaded

    def offload(self) -> None:
        """Saves the states of all running episodes and ends the processes.

        Raises EnvError where the environment cannot save its state (spec.state is "none"), and ends nothing then.
        """
        self._submit(self._offload()).result()

    def onload(self) -> None:
        """Starts the processes that do not run and loads the saved states.  Every other call does so too.  Raises EnvError if a
        state cannot be loaded, and LoadError if an environment cannot be built."""
        self._submit(self._ready_all()).result()

    def close(self) -> None:
        """Ends all processes.  Idempotent."""
        if not self._closed:
            self._closed = True
            _loop().run(self._end_all())

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        if self._closed:
            work.close()
            raise EnvError("the environments are closed; make new ones")
        return asyncio.run_coroutine_threadsafe(self._in_order(work), _loop().loop)

    async def _in_order(self, work: Coroutine[Any, Any, Any]) -> Any:
        async with self._order:
            return await work

    async def _end_all(self) -> None:
        async with self._order:
            await asyncio.gather(*(self._end(group) for group in self._groups))

    async def _end(self, group: _Group) -> None:
        process, group.process, group.buffers = group.process, None, None
        if process is not None:
            await process.kill()

    async def _ready_all(self) -> None:
        await _all(self._ready(group) for group in self._groups)

    async def _ready(self, group: _Group, *, frames: bool = False) -> tuple[EnvironmentProcess, Buffers]:
        """Returns a group's running process, with its episodes as they were saved, and the memory that is shared with it."""
        process = group.process
        if process is None or process.dead:
            process = await self._start(group)
        if group.buffers is None or (frames and not group.has_frames):
            await self._attach(group, process, frames)
        if group.saved:
            numbers, states = list(group.saved), list(group.saved.values())
            try:
                await process.request("load_state", {"ids": numbers, "states": states}, self.options.start_timeout_s)
            except EnvError as error:
                raise EnvError(f"the saved episodes of the environments {group.first} to {group.stop - 1}: {error}") from error
            group.saved = {}
        assert group.buffers is not None
        return process, group.buffers

    async def _start(self, group: _Group) -> EnvironmentProcess:
        making = self._making | {"num_envs": group.size}
        process = await EnvironmentProcess.start(making, self._limits, self._access, group.launch)
        group.process, group.buffers = process, None
        self._spec = VectorSpec.of(process.made)
        return process

    async def _attach(self, group: _Group, process: EnvironmentProcess, frames: bool) -> None:
        """Gives a process a segment of the needed size; its name is removed as soon as both have opened it."""
        spec = self.spec
        path, size = new_segment_path(), segment_bytes(spec, group.size, frames=frames)
        memory = open_segment(path, create_bytes=size)
        try:
            if memory is None:
                raise EnvError(f"no {size / GIB:.2f} GiB of shared memory for {group.size} environments: /dev/shm is too small")
            old, group.buffers = group.buffers, buffers_in(memory, spec, group.size, frames=frames)
            group.has_frames = frames
            if old is not None:
                _copy_observations(old, group.buffers)
            await process.request("attach", {"path": str(path), "frames": frames}, self.options.start_timeout_s)
        finally:
            path.unlink(missing_ok=True)

    async def _reset(self, ids: list[int], seeds: list[int], initial: list[int] | None) -> Obs:
        async def one(group: _Group) -> tuple[list[int], Obs]:
            places = [place for place, number in enumerate(ids) if group.first <= number < group.stop]
            own, given = group.local(ids), [seeds[place] for place in places]
            firsts = None if initial is None else [initial[place] for place in places]
            group.saved = {number: state for number, state in group.saved.items() if number not in own}
            return places, await self._reset_group(group, own, given, firsts)

        return _joined(len(ids), await _all(one(group) for group in self._groups if group.local(ids)))

    async def _reset_group(self, group: _Group, ids: list[int], seeds: list[int], initial: list[int] | None) -> Obs:
        """Begins episodes in a group.  A process that is lost here is replaced once; the episodes of its other environments are
        begun anew there."""
        arguments = {"ids": ids, "seeds": seeds, "initial": initial}
        process, buffers = await self._ready(group)
        try:
            texts = await process.request("reset", arguments, self.options.start_timeout_s)
        except (EnvError, DeadlineError) as error:
            if not process.dead:
                raise
            lost = [int(number) for number in np.flatnonzero(group.seed >= 0) if number not in ids]
            buffers = await self._replace(group, str(error))
            group.unreported = lost
            assert group.process is not None
            texts = await group.process.request("reset", arguments, self.options.start_timeout_s)
        group.seed[ids] = seeds
        group.note(ids, texts)
        return rows_of(buffers, ids, texts)

    async def _chunk_step(self, actions: np.ndarray, obs: Observed) -> ChunkResult:
        parts = await _all(self._chunk_of(group, actions[group.rows], obs) for group in self._groups)
        return _result(self.spec, self._groups, parts, actions.shape[1], obs)

    async def _chunk_of(self, group: _Group, actions: np.ndarray, obs: Observed) -> tuple[Buffers, Texts, list[int]]:
        """Executes a chunk in a group; returns the buffers, the texts and the rows whose episodes were lost."""
        if self.options.auto_reset and (group.seed < 0).any():
            raise EnvError(f"chunk_step before reset of the environments {group.first + np.flatnonzero(group.seed < 0)}")
        process, buffers = await self._ready(group, frames=obs == "all")
        if group.unreported:  # nothing is executed: these actions were chosen for episodes that are gone
            lost, group.unreported = group.unreported, []
            _clear(buffers)
            return buffers, group.texts_after(lost, "lost while other environments were reset"), lost
        buffers.actions[:, : actions.shape[1]] = actions
        try:
            reply = await process.request("chunk", {"chunk": actions.shape[1], "obs": obs}, self.options.timeout_s)
        except (EnvError, DeadlineError) as error:
            buffers, lost = await self._replace(group, str(error), frames=obs == "all"), list(range(group.size))
            return buffers, group.texts_after(lost, str(error)), lost
        group.num_losses = 0
        begun = group.seed >= 0
        group.seed[begun] = buffers.seed[begun]
        texts = Texts(**reply)
        group.instruction = list(texts.instruction)
        return buffers, texts, []

    async def _replace(self, group: _Group, why: str, *, frames: bool = False) -> Buffers:
        """Starts another process for a group and begins the episodes that follow the lost ones."""
        began = time.monotonic()
        await self._end(group)
        group.num_losses += 1
        if group.num_losses > MAX_LOSSES:
            raise EnvError(f"the environments {group.first} to {group.stop - 1} failed {group.num_losses} times in a row: {why}")
        group.saved = {}
        self.num_replaced += 1
        process, buffers = await self._ready(group, frames=frames)
        if self.options.auto_reset:
            ids = [int(number) for number in np.flatnonzero(group.seed >= 0)]
            seeds = [next_seed(int(group.seed[number])) for number in ids]
            arguments = {"ids": ids, "seeds": seeds, "initial": None}
            group.note(ids, await process.request("reset", arguments, self.options.start_timeout_s))
            group.seed[ids] = seeds
        else:
            group.seed[:] = -1
        _clear(buffers)
        took = time.monotonic() - began
        logger.warning("environments %d to %d were replaced in %.1f s: %s", group.first, group.stop - 1, took, why)
        return buffers

    async def _get_state(self, ids: list[int]) -> list[bytes]:
        found = await _all(self._states_of(group, group.local(ids)) for group in self._groups)
        states = {group.first + number: state for group, own in zip(self._groups, found, strict=True) for number, state in own}
        return [states[number] for number in ids]

    async def _states_of(self, group: _Group, ids: list[int]) -> list[tuple[int, bytes]]:
        if all(number in group.saved for number in ids):
            return [(number, group.saved[number]) for number in ids]
        process, _ = await self._ready(group)
        found = []
        for number in ids:  # one after the other: an answer on the pipe has a largest size
            (state,) = await process.request("get_state", {"ids": [number]}, self.options.timeout_s)
            found.append((number, state))
        return found

    async def _load_state(self, ids: list[int], states: list[bytes]) -> Obs:
        async def one(group: _Group) -> tuple[list[int], Obs]:
            places = [place for place, number in enumerate(ids) if group.first <= number < group.stop]
            own = group.local(ids)
            process, buffers = await self._ready(group)
            arguments = {"ids": own, "states": [states[place] for place in places]}
            texts = await process.request("load_state", arguments, self.options.start_timeout_s)
            group.seed[own] = buffers.seed[own]
            group.note(own, texts)
            return places, rows_of(buffers, own, texts)

        return _joined(len(ids), await _all(one(group) for group in self._groups if group.local(ids)))

    async def _offload(self) -> None:
        running = [group for group in self._groups if group.process is not None and not group.process.dead]
        begun = [[int(number) for number in np.flatnonzero(group.seed >= 0)] for group in running]
        found = await _all(self._states_of(group, ids) for group, ids in zip(running, begun, strict=True))
        for group, states in zip(running, found, strict=True):
            group.saved = dict(states)
        await _all(self._end(group) for group in running)


@functools.cache
def _loop() -> LoopThread:
    """Returns the event loop of all managers of this process."""
    return LoopThread("env-managers")


async def _all(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Returns all results.  Waits for every part before it raises the first error, so that no process is left at work."""
    found = await asyncio.gather(*work, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def _kill_all(groups: list[_Group]) -> None:
    for group in groups:
        if group.process is not None:
            group.process.kill_now()


def _clear(buffers: Buffers) -> None:
    """Sets what a chunk reports to the result of one in which nothing is executed."""
    for name in ("reward", "terminated", "truncated", "valid", "success"):
        getattr(buffers, name)[:] = 0
    for frames in (buffers.frame_images, buffers.frame_state):
        if frames is not None:
            frames[:] = 0


def _copy_observations(old: Buffers, new: Buffers) -> None:
    new.images[:], new.state[:], new.seed[:] = old.images, old.state, old.seed


def _joined(num_rows: int, parts: list[tuple[list[int], Obs]]) -> Obs:
    """Returns the observations of several groups as one.  parts: places of the rows, and the rows."""
    first = parts[0][1]
    images = np.empty((num_rows, *first.images.shape[1:]), np.uint8)
    state = np.empty((num_rows, *first.state.shape[1:]), np.float32)
    seed, instruction = np.empty(num_rows, np.int64), [""] * num_rows
    for places, obs in parts:
        images[places], state[places], seed[places] = obs.images, obs.state, obs.seed
        for place, text in zip(places, obs.instruction, strict=True):
            instruction[place] = text
    return Obs(images=images, state=state, instruction=instruction, seed=seed)


def _result(
    spec: VectorSpec, groups: list[_Group], parts: list[tuple[Buffers, Texts, list[int]]], chunk: int, obs: Observed
) -> ChunkResult:
    """Returns the results of all groups as one, in arrays of its own."""
    num_envs = groups[-1].stop
    whole = Buffers.new(spec, num_envs, frames=obs == "all")
    texts = Texts(instruction=[], final_instruction=[], info=[], num_rendered=0)
    lost = np.zeros(num_envs, np.bool_)
    for group, (buffers, own, own_lost) in zip(groups, parts, strict=True):
        _copy_rows(whole, group.rows, buffers)
        lost[[group.first + number for number in own_lost]] = True
        texts.instruction += own.instruction
        texts.final_instruction += own.final_instruction
        texts.info += own.info
        texts.num_rendered += own.num_rendered
    result = result_of(whole, chunk, texts)
    result.lost = lost
    return result


def _copy_rows(whole: Buffers, rows: slice, part: Buffers) -> None:
    for name in ("images", "state", "reward", "terminated", "truncated", "valid", "success", "seed"):
        getattr(whole, name)[rows] = getattr(part, name)
    ended = np.flatnonzero((part.terminated | part.truncated).any(axis=1))
    for name in ("final_images", "final_state", "final_seed"):
        getattr(whole, name)[rows.start + ended] = getattr(part, name)[ended]
    if whole.frame_images is not None and whole.frame_state is not None:
        assert part.frame_images is not None and part.frame_state is not None
        whole.frame_images[rows], whole.frame_state[rows] = part.frame_images, part.frame_state
