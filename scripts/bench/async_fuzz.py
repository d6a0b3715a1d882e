"""Fuzz of asynchronous training: random latencies, failures, filters, pauses and killed replicas; then every prompt is audited.

    python scripts/bench/async_fuzz.py --steps 1000 --engine fake          # replicas are Ray actors
    python scripts/bench/async_fuzz.py --steps 20 --engine hf              # a real model, real weights published each step
    python scripts/bench/async_fuzz.py --steps 200 --kill driver           # the driver itself is killed -9 again and again
    python scripts/bench/async_fuzz.py --steps 200 --scale                 # replicas come and go, and are killed while they start
    python scripts/bench/async_fuzz.py --steps 60 --scale --broken stale   # a control: it must fail

For each policy (drop, mask): train so many steps, then to the end of what was begun.  Asserted: trained staleness is never above
the bound; every prompt was trained, or dropped or rejected, exactly once, by files that the reward function and training append
to; no request failed, was cut short, or got tokens of older weights than all replicas had; nothing is left running; memory
does not grow.  Exit status 1 where anything of it is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import async_fuzz_parts as fuzz
import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM

from rlhub.agents.workflows.base import WorkflowParts
from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.engines.rollout.base import SamplingParams
from rlhub.errors import DeadlineError, EngineError, ResourceError, WorkerError
from rlhub.rollout_service.elastic import ReplicaBounds
from rlhub.rollout_service.executor.executor import ExecutorOptions, WorkflowExecutor
from rlhub.rollout_service.executor.ledger import PromptLedger
from rlhub.rollout_service.executor.staleness import Pacing, StalenessManager
from rlhub.rollout_service.fleet import Fleet, FleetLimits
from rlhub.rollout_service.service import RolloutService, ServiceOptions
from rlhub.sharding_manager.files import WeightWriter
from rlhub.single_controller import AsyncActor
from rlhub.utils.aio.task_runner import AsyncTaskRunner
from rlhub.utils.atomic import write_json
from rlhub.workers.memory_handover import WorkerRuntime
from tests.support.chat_model import save_chat_model
from tests.support.plain_train_engine import PlainTrainEngine

ROOT = Path(__file__).resolve().parents[2]
NEW_TOKENS = 12
WAIT_S = 120.0
RUNTIME = WorkerRuntime(device="cpu", seed=0, max_prompt_length=8, max_response_length=NEW_TOKENS, deadline_s=60.0)
MOST, PLACES, SCALED = 4, 4, 0.3
"""With --scale: the largest number of replicas, the requests that one runs at once, and the share of the steps with a change."""
START_S = 2.0
"""A replica that is killed while it starts is killed within this time after its process is there."""
RSS_FACTOR, RSS_SLACK_MB = 1.10, 30.0
"""Memory at the end against that after a fifth of the steps; a small process's arenas alone move by the slack."""


@dataclass(kw_only=True)
class Plan:
    """A run.  kill_every: steps between kills of a replica; checkpoint_every: steps between states.  hold: after the last step,
    wait to be killed.  scale: replicas come and go, by chance and by the queue.  broken: see async_fuzz_parts.BROKEN."""

    folder: Path
    steps: int
    policy: str = "drop"
    engine: str = "fake"
    backend: str = "ray"
    seed: int = 1
    batch: int = 8
    group_size: int = 2
    max_staleness: int = 2
    replicas: int = 2
    kill_every: int = 100
    checkpoint_every: int = 25
    mean_s: float = 0.01
    driver_kills: int = 5
    hold: bool = False
    scale: bool = False
    broken: str = ""

    @property
    def changes(self) -> int:
        """Changes of the replicas before which the run does not end, however fast its steps are: of each kind there is one."""
        return self.steps // 5 if self.scale else 0

    def command(self) -> list[str]:
        """Of a process that goes on with it."""
        names = ("folder", "steps", "policy", "engine", "backend", "seed", "checkpoint_every")
        given = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(self, name)))]
        given += ["--scale"] if self.scale else []
        return [sys.executable, str(Path(__file__).resolve()), "--child", *given]


class Loop:
    """A driver: service, executor and what stands in for training.  Goes on from `state.json` in the folder."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.stop = plan, threading.Event()
        self.state_file = plan.folder / "state.json"
        state = json.loads(self.state_file.read_text()) if self.state_file.exists() else None
        # Killed before its first checkpoint, a run begins anew: then all of it did not happen.
        before = state["executor"]["ledger"] if state else {"counts": dict.fromkeys(fuzz.ENDS, 0), "next_ordinal": 0}
        fuzz.take_back(plan.folder, before["counts"], before["next_ordinal"])
        self.step = state["step"] if state else 0
        self.records = fuzz.Records(plan.folder)
        self.kills = self.pauses = 0
        self.scaled: Counter[str] = Counter()
        self.runner = AsyncTaskRunner(name="episodes")
        self.service, self.writer = self._service()
        self.witness = fuzz.Witness(self.service.router)
        self.ledger = PromptLedger(on_end=self.records.ended)
        self.executor = self._executor()
        if state is not None:
            self.executor.load_state(state["executor"])
        self.publish(self.step)
        self.executor.start(fuzz.prompts(self.executor.first_ordinal, self.stop))

    def _service(self) -> tuple[RolloutService, WeightWriter]:
        plan, config = self.plan, ActorRolloutRefConfig()
        config.rollout.name = fuzz.FUZZ_ENGINE if plan.engine == "fake" else plan.engine
        self.trainer = PlainTrainEngine(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)))
        if plan.engine != "fake":
            path = plan.folder / "model"
            config.model.path = str(path if path.exists() else save_chat_model(path))
            self.trainer = PlainTrainEngine(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
        options = ServiceOptions(
            backend=plan.backend,  # type: ignore[arg-type]
            counts=(plan.replicas,),
            log_dir=str(plan.folder / "logs"),
            plugins=("async_fuzz_parts",),
            worker_env={"PYTHONPATH": os.pathsep.join((str(ROOT), str(Path(__file__).parent)))},
            run_folder=plan.folder,
            limits=FleetLimits(restarts=1 << 20, update_s=60.0, patience_s=2.0),
            ray_init={"num_cpus": 2, "object_store_memory": 150 << 20},
            bounds=ReplicaBounds(
                least=1 if plan.scale else plan.replicas, most=MOST if plan.scale else None, by_queue=plan.scale
            ),
        )
        if plan.scale:
            config.rollout.max_num_seqs = PLACES
        service = RolloutService(config, RUNTIME, options, loop=self.runner.loop)
        service.control.rule.hold_s, service.control.rule.idle_s = 1.0, 2.0
        if plan.broken:
            setattr(Fleet, *fuzz.BROKEN[plan.broken])
        service.start()
        return service, WeightWriter(self.trainer, service.folder, bucket_bytes=1 << 20)

    def _executor(self) -> WorkflowExecutor:
        plan = self.plan
        sampling = SamplingParams(max_new_tokens=NEW_TOKENS, stop_token_ids=(2,))
        parts = WorkflowParts(
            tokenizer=None,
            sampling=sampling,
            max_prompt_length=8,
            max_response_length=NEW_TOKENS,
            score=None,  # type: ignore[arg-type]
            kwargs={"seed": plan.seed, "mean_s": plan.mean_s},
        )
        workflow = fuzz.Erratic(parts)
        return WorkflowExecutor(
            runner=self.runner,
            engine=self.witness,
            workflow_for=lambda row: workflow,
            staleness=StalenessManager(plan.batch, plan.max_staleness, pacing=Pacing(plan.batch)),
            ledger=self.ledger,
            options=ExecutorOptions(
                group_size=plan.group_size,
                seed=plan.seed,
                stale_policy=plan.policy,  # type: ignore[arg-type]
                episode_timeout_s=10.0,
                episode_retries=1,
                min_samples=1,
            ),
            on_group=self.records.reward,
            keep=lambda group: fuzz.chance(plan.seed, group.ordinal, "filter").random() >= fuzz.FILTER,
            interrupt=self.witness.interrupt,
        )

    def publish(self, version: int) -> None:
        self.trainer.perturb(version)
        self.writer.write(version)
        self.service.publish(str(self.service.folder), version)
        self.witness.settled = version

    def train_step(self) -> bool:
        """One step; False when nothing is left."""
        self.step += 1
        drawn = fuzz.chance(self.plan.seed, self.step, "step")
        first = drawn.choice((1, self.plan.batch // 2, self.plan.batch))
        groups = self.executor.next_groups(first, WAIT_S, step=self.step)
        if first < self.plan.batch:
            groups += self.executor.next_groups(self.plan.batch - first, WAIT_S, step=self.step)
        self.records.train(groups, self.step)
        if drawn.random() < 0.5:
            time.sleep(drawn.random() * self.plan.mean_s)
        self.executor.trained(self.step)
        self.disturb(drawn)
        self.publish(self.step)
        self.executor.set_version(self.step)
        if self.step % self.plan.checkpoint_every == 0:
            self.save()
        return bool(groups)

    def save(self) -> None:
        write_json(self.state_file, {"step": self.step, "executor": self.executor.state()})

    def disturb(self, drawn: random.Random) -> None:
        """Pauses of the executor and of all replicas, kills."""
        if drawn.random() < 0.05:
            self.pauses += 1
            who = drawn.choice((self.executor, self.service))
            who.pause()
            time.sleep(0.02)
            who.resume()
        if self.plan.scale and drawn.random() < SCALED:
            asyncio.run_coroutine_threadsafe(self.scale(drawn), self.runner.loop).result(240)
        if self.plan.kill_every and self.step % self.plan.kill_every == self.plan.kill_every // 2:
            self.kill_replica(drawn)

    @property
    def has_changed(self) -> bool:
        """Whether as many changes of the replicas have ended as the plan wants."""
        counts, wanted = self.service.control.counts, self.plan.changes
        return sum(counts.values()) >= wanted and (not wanted or min(counts["add"], counts["remove"]) > 0)

    async def scale(self, drawn: random.Random) -> None:
        """Begins to add a replica, some of which are killed while they start, or to remove one, whatever else goes on."""
        control, fleet = self.service.control, self.service.router.fleet
        what = drawn.choice(("add", "add and kill", "remove"))
        try:
            if what == "remove":
                control.begin_remove(drawn.choice(sorted(fleet.names)), "chance")
            else:
                change = control.begin_add("chance")
                if what == "add and kill":
                    self.killing = asyncio.create_task(self.kill_starting(change.replica, max(0.0, drawn.uniform(-1.0, 1.0))))
        except (ResourceError, EngineError):
            what = "refused"
        self.scaled[what] += 1

    async def kill_starting(self, name: str, patience_s: float) -> None:
        """Kill -9 of a replica that starts, as soon as its process is there or a random while later."""
        fleet = self.service.router.fleet
        while name in fleet.names and not (found := [actor for actor in fleet._joining if actor.name == name]):
            await asyncio.sleep(0.01)
        await asyncio.sleep(patience_s * START_S)
        with suppress(WorkerError, DeadlineError):
            if name in fleet.starting and found[0] in fleet._joining:
                await self.kill_process(found[0])
                self.scaled["killed while it started"] += 1

    async def kill_process(self, actor: AsyncActor) -> None:
        if self.plan.backend == "local":
            actor.kill()
        else:
            status = await actor.call("status", deadline_s=240.0)
            os.kill(status.pid, signal.SIGKILL)

    def kill_replica(self, drawn: random.Random) -> None:
        """Kill -9 of its process, or with the local backend the end of its thread; never the last one."""

        async def kill() -> None:
            replicas = self.service.router.fleet.serving()
            if len(replicas) > 1:
                victim = drawn.choice(replicas)
                self.kills += 1
                await self.kill_process(victim.actor)

        asyncio.run_coroutine_threadsafe(kill(), self.runner.loop).result(240)

    def footprint(self) -> fuzz.Footprint:
        async def count() -> int:
            return len(asyncio.all_tasks())

        process = psutil.Process()
        tasks = asyncio.run_coroutine_threadsafe(count(), self.runner.loop).result(30)
        return fuzz.Footprint(rss_mb=process.memory_info().rss / 2**20, tasks=tasks, files=process.num_fds())

    def close(self) -> None:
        self.executor.close()
        self.service.close()
        self.runner.close()
        self.records.close()


@dataclass
class Result:
    """problems: none if the run is as it should be.  shown: the row of the table."""

    problems: list[str] = field(default_factory=list)
    shown: dict[str, str] = field(default_factory=dict)


def whole_run(plan: Plan) -> Result:
    """All steps, then what was begun."""
    result, started = Result(), time.monotonic()
    loop = Loop(plan)
    early: fuzz.Footprint | None = None
    totals: dict[str, float] = {}
    try:
        while loop.step < plan.steps or not loop.has_changed:
            loop.train_step()
            for name, value in loop.executor.metrics().items():
                is_extreme = name.endswith("/max")
                totals[name] = max(totals.get(name, 0.0), value) if is_extreme else totals.get(name, 0.0) + value
            if early is None and loop.step >= plan.steps / 5:
                early = loop.footprint()
        late = loop.footprint()
        loop.stop.set()
        while loop.train_step():
            pass
        left = len(loop.runner._tasks)
        result.problems += fuzz.findings(plan.folder, loop.ledger, plan.max_staleness)
        result.problems += loop.witness.findings()
        result.problems += leaks(early or late, late, left, loop.ledger, plan)
    finally:
        loop.close()
    counts = loop.ledger.counts
    result.shown = {
        "policy": plan.policy,
        "seed": str(plan.seed),
        "engine": f"{plan.engine} ({plan.backend})",
        "steps": str(loop.step),
        "trained / rejected / dropped": " / ".join(str(count) for count in counts.values()),
        "staleness max": f"{totals['staleness/max']:.0f} of {plan.max_staleness}",
        "masked": f"{totals['staleness/masked_token_share'] / loop.step:.1%}",
        "beyond": f"{totals['staleness/beyond_share'] / loop.step:.1%}",
        "kills / pauses": f"{loop.kills} / {loop.pauses}",
        **(scale_shown(loop) if plan.scale else {}),
        "MB early, late": f"{(early or late).rss_mb:.0f}, {late.rss_mb:.0f}",
        "s": f"{time.monotonic() - started:.0f}",
    }
    return result


def scale_shown(loop: Loop) -> dict[str, str]:
    """Columns on the replicas that came and went, by chance or by the queue."""
    counts = loop.service.control.counts
    by_queue = sum(change.reason != "chance" for change in loop.service.control.changes)
    return {
        "added / removed / failed": " / ".join(str(counts[kind]) for kind in ("add", "remove", "failed")),
        "killed starting": str(loop.scaled["killed while it started"]),
        "refused / by queue": f"{loop.scaled['refused']} / {by_queue}",
    }


def leaks(early: fuzz.Footprint, late: fuzz.Footprint, left: int, ledger: PromptLedger, plan: Plan) -> list[str]:
    """Sentences on what grew or stayed."""
    problems = []
    if late.rss_mb > early.rss_mb * RSS_FACTOR + RSS_SLACK_MB:
        problems.append(f"memory grew from {early.rss_mb:.0f} to {late.rss_mb:.0f} MB")
    if late.files > early.files + 20:
        problems.append(f"open files grew from {early.files} to {late.files}")
    most = (plan.max_staleness + 1) * plan.batch * plan.group_size * 4 + 50
    if late.tasks > most:
        problems.append(f"{late.tasks} tasks run, expected at most {most}")
    if left:
        problems.append(f"{left} episodes still run when all prompts have ended")
    if ledger.in_phase(*fuzz.Phase):
        problems.append(f"{len(ledger.in_phase(*fuzz.Phase))} prompts have not ended")
    return problems


def killed_run(plan: Plan) -> Result:
    """Drivers that are killed -9 at random times, each going on from the last checkpoint; the last one ends by itself."""
    drawn, started, lives = random.Random(plan.seed), time.monotonic(), 0
    log = plan.folder / "drivers.log"
    plan.folder.mkdir(parents=True, exist_ok=True)
    while True:
        lives += 1
        with log.open("a") as output:
            hold = ["--hold"] if lives <= plan.driver_kills else []  # however fast it is, it is killed
            child = subprocess.Popen([*plan.command(), *hold], stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        patience = None if lives > plan.driver_kills else when_to_kill(plan.folder, drawn, child)
        if patience is None:
            break
        child.kill()
        child.wait()
    if child.wait(timeout=600) != 0:
        return Result([f"the last driver failed:\n{log.read_text()[-3000:]}"])
    done = json.loads((plan.folder / "done.json").read_text())
    shown = {
        "policy": plan.policy,
        "seed": str(plan.seed),
        "engine": f"{plan.engine} ({plan.backend})",
        "steps": str(done["step"]),
    }
    shown |= {"driver kills": str(lives - 1), "trained / rejected / dropped": " / ".join(map(str, done["counts"].values()))}
    return Result(done["problems"], shown | {"s": f"{time.monotonic() - started:.0f}"})


def when_to_kill(folder: Path, drawn: random.Random, child: subprocess.Popen[bytes]) -> float | None:
    """Wait until it trains, then a random while; None if it ended before."""
    trained = folder / "trained.jsonl"

    def size() -> int:
        return trained.stat().st_size if trained.exists() else 0

    begun = size()
    while child.poll() is None and size() in (begun, 0):
        begun = min(begun, size())
        time.sleep(0.05)
    patience = drawn.uniform(0.1, 3.0)
    try:
        child.wait(patience)
    except subprocess.TimeoutExpired:
        return patience
    return None


def child_run(plan: Plan) -> int:
    """A driver that may be killed; the audit, when it comes to the end."""
    loop = Loop(plan)
    try:
        begun = loop.step
        while loop.step < plan.steps:
            loop.train_step()
        if plan.hold and loop.step > begun:
            threading.Event().wait()
        loop.stop.set()
        while loop.train_step():
            pass
        problems = fuzz.findings(plan.folder, loop.ledger, plan.max_staleness) + loop.witness.findings()
        counts = {phase.value: count for phase, count in loop.ledger.counts.items()}
        write_json(plan.folder / "done.json", {"step": loop.step, "counts": counts, "problems": problems})
    finally:
        loop.close()
    return 0


def show(results: list[Result]) -> int:
    table = Table(*dict.fromkeys(name for result in results for name in result.shown))
    for result in results:
        table.add_row(*(result.shown.get(str(column.header), "") for column in table.columns))
    console = Console(width=170)
    console.print(table)
    problems = [problem for result in results for problem in result.problems]
    for problem in problems:
        console.print(f"WRONG: {problem}")
    console.print("every prompt ended exactly once, none trained beyond the bound" if not problems else "FAILED")
    return int(bool(problems))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--engine", default="fake", choices=("fake", "hf"))
    parser.add_argument("--backend", default="ray", choices=("ray", "local"))
    parser.add_argument("--policy", default="both", choices=("both", "drop", "mask"))
    parser.add_argument("--kill", default="replica", choices=("replica", "driver"))
    parser.add_argument("--scale", action="store_true", help="replicas are added and removed meanwhile, between 1 and 4")
    parser.add_argument("--broken", default="", choices=("", *fuzz.BROKEN), help="control: what a fault of the fleet must show")
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--checkpoint-every", type=int, default=25)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    common = {name: getattr(given, name) for name in ("steps", "engine", "backend", "checkpoint_every", "scale", "broken")}
    if given.child:
        return child_run(Plan(folder=given.folder, policy=given.policy, hold=given.hold, seed=given.seed[0], **common))
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        policies = ("drop", "mask") if given.policy == "both" else (given.policy,)
        for policy, seed in itertools.product(policies, given.seed):
            plan = Plan(folder=(given.folder or Path(temporary)) / f"{policy}-{seed}", policy=policy, seed=seed, **common)
            plan.kill_every = min(plan.kill_every, max(plan.steps // 3, 2))
            if plan.engine != "fake" and plan.backend == "local":
                plan.kill_every = 0  # loading a model is not thread-safe, and a replica that comes back loads one in a thread
            results.append(killed_run(plan) if given.kill == "driver" else whole_run(plan))
    return show(results)


if __name__ == "__main__":
    sys.exit(main())
