"""What environments in lock-step cost beside the simulation, and how they scale over processes; all within one run.

    python scripts/bench/vector_environments.py [--rounds 5] [--chunks 40]

CPU: 16 environments with two cameras of 224 x 224 pixels in 4 processes, whose simulators do nothing but fill their pictures; the
CPU seconds of this process and of its children, less those of the same simulators in one process, per environment and chunk. The
control sends the same observations as JSON lines, as environments for episodes do.  Waiting: 64 environments whose step sleeps
for 10 ms, in 1 and in 8 processes.  Rendering: observations per environment for a chunk of 8 actions.  Stages: episodes of 8
actions, each of which waits for 5 ms, chosen two at a time by a tiny vision-language policy, in 1 and in 2 stages.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlhub.envs.vector.base import StepOutcome, VectorEnv, VectorSpec
from rlhub.envs.vector.lockstep import make_vector_env
from rlhub.envs.vector.manager import EnvManager, EnvManagerOptions
from rlhub.utils.children.wire import decode, encode

HERE = os.path.abspath(__file__)
NUM_ENVS, PROCESSES, SIZE, CHUNK = 16, 4, 224, 8
SLEEPERS, SLEEP_S, MANY = 64, 0.01, 8
WAITING, WAITERS, WAIT_S, ACTIONS, WAVES, WIDTH = 64, 16, 0.005, 8, 4, 256


class Filled:
    """A simulator without physics.  sleep_s: waits in each step."""

    def __init__(self, *, size: int = SIZE, sleep_s: float = 0.0) -> None:
        cameras = ("left", "right") if size else ()
        bounds: dict[str, Any] = {"low": (-1.0,) * 7, "high": (1.0,) * 7, "action_dim": 7}
        self.spec = VectorSpec(cameras=cameras, height=size, width=size, state_dim=8, chunk=CHUNK, max_steps=10**6, **bounds)
        self._sleep_s, self._steps = sleep_s, 0

    def reset(self, seed: int, initial: int | None) -> str:
        return ""

    def step(self, action: np.ndarray) -> StepOutcome:
        if self._sleep_s:
            time.sleep(self._sleep_s)
        self._steps += 1
        return StepOutcome(reward=0.0, terminated=False)

    def observe(self, images: np.ndarray, state: np.ndarray) -> None:
        images[:] = self._steps % 256
        state[:] = self._steps

    def get_state(self) -> bytes:
        return b""

    def load_state(self, state: bytes) -> None:
        """Has none."""

    def close(self) -> None:
        """Holds nothing."""


class Waiting(Filled):
    """A simulator whose episodes have a few actions that wait."""

    def __init__(self) -> None:
        super().__init__(sleep_s=WAIT_S)
        size = 32
        bounds: dict[str, Any] = {"low": (-1.0,) * 2, "high": (1.0,) * 2, "action_dim": 2}
        self.spec = VectorSpec(cameras=("top",), height=size, width=size, chunk=2, max_steps=ACTIONS, language=True, **bounds)

    def reset(self, seed: int, initial: int | None) -> str:
        return "reach red"


def cpu_s(env: VectorEnv | None = None) -> float:
    """CPU seconds of this process and of the processes of a manager."""
    own = sum(psutil.Process().cpu_times()[:2])
    if not isinstance(env, EnvManager):
        return own
    tops = [psutil.Process(pid) for pid in env.process_ids()]
    return own + sum(sum(one.cpu_times()[:2]) for top in tops for one in (top, *top.children(recursive=True)))


def cpu_per_chunk_ms(env: VectorEnv, chunks: int) -> float:
    """CPU milliseconds per environment and chunk."""
    actions = np.zeros((env.num_envs, CHUNK, env.spec.action_dim), np.float32)
    began = cpu_s(env)
    for _ in range(chunks):
        env.chunk_step(actions)
    return 1e3 * (cpu_s(env) - began) / chunks / env.num_envs


def json_wire_ms(chunks: int) -> float:
    """CPU milliseconds to encode and decode the observation of one environment as JSON with base64."""
    images = np.random.default_rng(0).integers(0, 256, (2, SIZE, SIZE, 3), np.uint8)
    began = cpu_s()
    for _ in range(chunks):
        line = encode({"pixels": images.tobytes(), "shape": list(images.shape), "state": np.zeros(8, np.float32)})
        np.frombuffer(decode(line)["pixels"], np.uint8).reshape(images.shape).copy()
    return 1e3 * (cpu_s() - began) / chunks


def started(name: str, num_envs: int, processes: int, **settings: float) -> EnvManager:
    env = EnvManager(EnvManagerOptions(name=f"{HERE}:{name}", num_envs=num_envs, processes=processes, settings=settings))
    env.reset(seeds=range(num_envs))
    return env


def sleepers_s(env: EnvManager) -> float:
    """Seconds of one action in each of the sleeping environments."""
    began = time.perf_counter()
    env.chunk_step(np.zeros((env.num_envs, 1, 7), np.float32))
    return time.perf_counter() - began


def stages_s(rounds: int) -> dict[int, float]:
    """Returns the median seconds of WAITING x WAVES episodes with 1 and with 2 stages, measured in turns.

    The policy is so wide that it computes about as long as the simulators wait: stages hide no more than the shorter of the two.
    """
    # Here, because the environments' processes import this file and shall not load torch.
    from recipes.tiny_smolvlm import write_model
    from rlhub.config.sections.env import EnvConfig
    from rlhub.config.sections.vla import vla_of
    from rlhub.engines.rollout.base import SamplingParams
    from rlhub.engines.rollout.embodied import EpisodeRunner, EpisodeStart
    from rlhub.models.tokenizer import load_tokenizer
    from tests.support import vla

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), 1, vla.WORDS, num_places=vla.TOKENS, num_bins=vla.BINS, width=WIDTH)
        model = vla.model_config(Path(folder))
        settings, tokenizer, engine = vla_of(model), load_tokenizer(folder), vla.rollout_engine(model)
        assert settings is not None
        options: dict[str, Any] = {"name": f"{HERE}:Waiting", "num_envs": WAITING, "manager": {"processes": WAITERS}}
        runners = {stages: EpisodeRunner(engine, EnvConfig(**options, stages=stages), settings, tokenizer) for stages in (1, 2)}
        starts = [
            EpisodeStart(scene=number, sample=0, seed=number, initial=-1, policy_seed=number) for number in range(WAITING * WAVES)
        ]
        seconds: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(rounds + 1):  # the first one starts the processes
            for stages, runner in runners.items():
                began = time.perf_counter()
                runner.run(starts, SamplingParams(max_new_tokens=vla.TOKENS))
                seconds[stages].append(time.perf_counter() - began)
        for runner in runners.values():
            runner.close()
    return {stages: statistics.median(found[1:]) for stages, found in seconds.items()}


def median(measure: Callable[[], float], rounds: int) -> float:
    return statistics.median(measure() for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunks", type=int, default=40, help="of each round")
    given = parser.parse_args()
    table = Table(title=f"Environments in lock-step ({os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start)")
    for column in ("figure", "manager", "control", "ratio"):
        table.add_column(column)

    plain = make_vector_env(f"{HERE}:Filled", {}, NUM_ENVS)
    plain.reset(seeds=range(NUM_ENVS))
    env = started("Filled", NUM_ENVS, PROCESSES)
    own = median(lambda: cpu_per_chunk_ms(plain, given.chunks), given.rounds)
    whole = median(lambda: cpu_per_chunk_ms(env, given.chunks), given.rounds)
    wire = median(lambda: json_wire_ms(given.chunks), given.rounds)
    rendered = env.chunk_step(np.zeros((NUM_ENVS, CHUNK, 7), np.float32)).num_rendered / NUM_ENVS
    every = env.chunk_step(np.zeros((NUM_ENVS, CHUNK, 7), np.float32), "all").num_rendered / NUM_ENVS
    env.close()
    name = f"CPU ms per environment and chunk, 2 x {SIZE} px"
    table.add_row(f"{name}, in all", f"{whole:.3f}", f"{own:.3f} in one process", "")
    table.add_row(f"{name}, beside the simulators", f"{whole - own:.3f}", f"{wire:.3f} as JSON", f"{(whole - own) / wire:.3f}")
    table.add_row(f"rendered per environment, chunk {CHUNK}", f"{rendered:g}", f"{every:g} with obs=all", "")

    few, many = (started("Filled", SLEEPERS, number, size=0, sleep_s=SLEEP_S) for number in (1, MANY))
    slow, fast = median(lambda: sleepers_s(few), given.rounds), median(lambda: sleepers_s(many), given.rounds)
    few.close()
    many.close()
    table.add_row(
        f"{SLEEPERS} steps of {SLEEP_S * 1e3:g} ms",
        f"{fast * 1e3:.0f} ms, {MANY} processes",
        f"{slow * 1e3:.0f} ms, 1",
        f"{slow / fast:.1f}",
    )
    stages = stages_s(given.rounds)
    name = f"{WAITING * WAVES} episodes of {ACTIONS} steps of {WAIT_S * 1e3:g} ms, {WAITERS} processes, a policy"
    both, one = (f"{stages[number] * 1e3:.0f} ms, {number} stage{'s' * (number > 1)}" for number in (2, 1))
    table.add_row(name, both, one, f"{stages[2] / stages[1]:.2f}")
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
