"""Kills driver, training ranks and replicas of asynchronous jobs at random times, and audits every prompt, token and reward.

    python scripts/checks/exactly_once.py --kills 12                        # agents, then online sessions: 12 kills each
    python scripts/checks/exactly_once.py --job agents --kills 3 --broken forget      # a control: the audit must find it
    python scripts/checks/exactly_once.py --job policy                       # the number of replicas follows the queue

Each job runs on Ray with two training ranks and two replicas of a tiny model.  Its episodes have several trajectories: an agent
(`exactly_once_parts.py`) talks in two conversations at once, and one attempt in ten fails and begins again; online, an
application of its own (`online_application.py`) drives them over HTTP, loses connections, repeats requests and leaves sessions.
Driver, ranks and replicas get a third of the kills (SIGKILL) each, while the job starts or some steps later.  A job that ended is
started again with the same command.

The job `policy` has no kills but one replica, of two at most: first the trainer waits for long episodes, and the policy must add
a replica; then training takes long and the episodes wait, and the policy must remove one.

Asserted: every step is there once; every prompt was trained, rejected or dropped exactly once or is open in the last checkpoint;
each episode that trained is one attempt that completed, with its reward and all tokens that it was given, and no other; the
ledger's failures are those of these attempts; no token is older than max_staleness; what outlives a job ends within a minute.
Exit status 1 where anything is not so, with --broken where nothing was found.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
from rich.console import Console
from rich.table import Table

from rlhub.protocol import DataProto
from rlhub.rollout_service.executor.episode_groups import PromptItem, episode_data
from rlhub.trainer.ppo.offline_source import Recorded
from scripts.checks import jobs, online
from scripts.checks.jobs import Job, Task
from scripts.checks.online import AGENT, BATCH, SAMPLES

KILLED, POLICY = ("agents", "online"), "policy"
TARGETS = ("driver", "rank", "replica")
PARTS = "scripts.checks.exactly_once_parts"
BROKEN = "RLHUB_CHECK_BROKEN"
FAULTS = {
    "forget": "no prompt trained twice",
    "lose": "no prompt is lost",
    "twice": "it was given [",
    "stale": "versions old",
}
"""The faults of exactly_once_parts.py, and what of the audit's words must tell of each."""
STALENESS, RETRIES, CONVERSATIONS, SAVED = 2, 2, 2, 2
RUN_S, POLICY_S, END_S = 400.0, 1500.0, 60.0
STARTING, STEP_S, START_S = 0.25, 2.0, 15.0
"""The share of kills before a step is done, the longest time after a step, and that after a process is there."""
TOLERANCE = 1e-5
console = Console(width=160, markup=False)


@dataclass(slots=True, kw_only=True)
class Kill:
    """A SIGKILL.  steps: it comes when the job has done so many more; 0: while it starts.  delay_s: from then."""

    target: str
    number: int
    steps: int
    delay_s: float
    happened: str = "did not come"
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Plan:
    """A job and its kills.  backend: local for a job in one process.  problems: none if all is as it should be."""

    name: str
    folder: Path
    kills: Sequence[Kill]
    seed: int
    broken: str = ""
    backend: str = "ray"
    lives: int = 0
    problems: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Returns the number of the job's steps, more than its kills can wait for: a step may pass before one has its victim."""
        return BUSY_STEPS + CALM_STEPS if self.name == POLICY else max(8, sum(kill.steps + 1 for kill in self.kills) + 4)

    @property
    def check(self) -> online.Check:
        """Returns the check of online.py that has the job's folder and steps."""
        count = self.steps * BATCH * SAMPLES
        return online.Check(folder=self.folder, episodes=count, seed=self.seed, conversations=CONVERSATIONS)


def draw(count: int, seed: int, known: Sequence[str] = TARGETS) -> list[Kill]:
    """Returns that many kills, of each of the targets as many, in random order."""
    chance = random.Random(seed)
    targets = [known[number % len(known)] for number in range(count)]
    chance.shuffle(targets)
    kills = []
    for target in targets:
        steps = 0 if chance.random() < STARTING else chance.choice((1, 1, 2))
        delay_s = chance.uniform(0, STEP_S if steps else START_S if target == "driver" else STEP_S)
        kills.append(Kill(target=target, number=chance.randrange(2), steps=steps, delay_s=delay_s))
    return kills


# The jobs.


def cluster(plan: Plan) -> list[str]:
    """Returns the settings of two ranks, two replicas and frequent checkpoints."""
    two = (*jobs.replicas(), "trainer.n_gpus_per_node=2", "trainer.ray_init.num_cpus=6")
    return [
        *(two if plan.backend == "ray" else jobs.ASYNC),
        *(f"trainer.deadline_s.{name}={RUN_S}" for name in jobs.DEADLINES),
        f"trainer.max_staleness={STALENESS}",
        "trainer.pacing=fixed",
        f"trainer.save_freq={SAVED}",
        "actor_rollout_ref.rollout.replica_restarts=20",
        f"trainer.total_training_steps={plan.steps}",
        f"trainer.seed={plan.seed}",
        *([f"trainer.plugins=[{PARTS}]"] if plan.broken else []),
    ]


def agents(plan: Plan) -> list[str]:
    """Returns the command line of the job whose agent has two conversations."""
    task = Task(folder=plan.folder / "task").write()
    more = [
        f"data.train_files={task.folder / 'chats.parquet'}",
        f"data.train_batch_size={BATCH}",
        "data.max_prompt_length=120",
        "data.max_response_length=80",
        f"actor_rollout_ref.model.path={task.folder / 'chat'}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"{AGENT}.default_agent_loop={PARTS}:Conversations",
        f"{AGENT}.episode_retries={RETRIES}",
        f"{AGENT}.kwargs.reward=agent",
        f"{AGENT}.kwargs.log={plan.folder / 'attempts.jsonl'}",
    ]
    return task.arguments(plan.folder / "run", *more, *cluster(plan))


BUSY_STEPS, CALM_STEPS, PLACES = 6, 50, 64
"""Steps of long episodes and of long training, and the requests that a replica runs at once."""


def policy(plan: Plan) -> list[str]:
    """Returns the settings of the job whose replicas follow the queue."""
    return [
        "data.max_response_length=300",
        "trainer.pools.generation.n_gpus_per_node=2",
        "trainer.placement.rollout=generation",
        "actor_rollout_ref.rollout.min_replicas=1",
        "actor_rollout_ref.rollout.max_replicas=2",
        f"actor_rollout_ref.rollout.max_num_seqs={PLACES}",
        f"{AGENT}.kwargs.busy={BUSY_STEPS * BATCH}",
        "algorithm.adv_estimator=slow_grpo",
        f"trainer.plugins=[{PARTS}]",
        f"trainer.total_training_steps={plan.steps}",
    ]


def audit_policy(plan: Plan) -> None:
    """Looks for the policy's changes in the metrics and in the log."""
    rows = [json.loads(line) for line in (plan.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    changes = {kind: rows[-1][f"rollout/replicas_{kind}"] for kind in ("added", "removed", "failed")}
    plan.numbers["changes of the number"] = {kind: f"{count:g}" for kind, count in changes.items()}
    plan.numbers["replicas by step"] = " ".join(f"{row['rollout/replicas']:g}" for row in rows)
    phases = {"long episodes": rows[1:BUSY_STEPS], "long training": rows[-BUSY_STEPS:]}
    plan.numbers["trainer idle"] = {name: f"{mean(row['trainer/idle_share'] for row in of):.2f}" for name, of in phases.items()}
    lines = (plan.folder / "life-1.log").read_text(errors="replace").splitlines()
    plan.numbers["why"] = "\n".join(line.partition(": ")[2] for line in lines if " replica rollout-" in line)
    if changes["added"] < 1 or changes["removed"] < 1:
        plan.problems.append(
            f"the policy added {changes['added']:g} replicas and removed {changes['removed']:g}, expected 1 each"
        )


def run(plan: Plan, arguments: Sequence[str]) -> None:
    """Starts the job until it comes to its end, with the kills on the way."""
    kills, last = list(plan.kills), None
    while not plan.problems:
        plan.lives += 1
        job = jobs.start(arguments, plan.folder / "run", plan.folder / f"life-{plan.lives}.log")
        try:
            while kills and strike(plan, job, kills[0]):
                last = kills.pop(0)
                if last.target != "replica":
                    break
            if end(plan, job, last) == 0:
                break
        finally:
            job.end()
    if kills and not plan.problems:
        plan.problems.append(f"the job ended before {len(kills)} of its kills")


def strike(plan: Plan, job: Job, kill: Kill) -> bool:
    """Sends the signal when its moment has come; returns False where the job ended before."""
    done = max(job.steps(), default=0)
    job.until(lambda: victim(job, kill), RUN_S)
    if kill.steps:
        job.until(lambda: max(job.steps(), default=0) >= done + kill.steps, RUN_S)
    time.sleep(kill.delay_s)
    found = job.until(lambda: victim(job, kill), RUN_S)
    if found is None:
        return False
    found.kill()
    kill.happened = f"life {plan.lives}, {f'after step {max(job.steps(), default=0)}' if kill.steps else 'at the start'}"
    name = "driver" if kill.target == "driver" else f"{kill.target} {kill.number}"
    console.print(f"[{plan.kills.index(kill) + 1}/{len(plan.kills)}] {plan.name}: {name} killed in {kill.happened}")
    return True


def victim(job: Job, kill: Kill) -> psutil.Process | None:
    """Returns the process to kill, once it is there."""
    if kill.target == "driver":
        return psutil.Process(job.process.pid) if job.code is None else None
    return job.rank(f"actor-rank{kill.number}.log" if kill.target == "rank" else f"rollout-{kill.number}.log")


def end(plan: Plan, job: Job, kill: Kill | None) -> int | None:
    """Waits for the job's end, which the last kill may bring about; returns its exit status."""
    began = time.monotonic()
    code = job.wait(POLICY_S if plan.name == POLICY else RUN_S)
    here = kill is not None and kill.happened.startswith(f"life {plan.lives},")
    expected = {0}
    if here and kill is not None and kill.target != "replica":
        expected = {-signal.SIGKILL if kill.target == "driver" else 1}
        kill.seconds = time.monotonic() - began
    elif here and kill is not None and not kill.steps:
        expected = {0, 1}  # a run does not start without all of its replicas
    if code not in expected or code == 1 and not job.error:
        plan.problems.append(f"life {plan.lives} ended with {code}, expected {expected}: {job.output[-1500:]}")
    if left := job.ends_within(END_S):
        plan.problems.append(f"{len(left)} processes outlived life {plan.lives} by {END_S:.0f} s: {'; '.join(left)}")
    return code


# The audit.


@dataclass(slots=True, kw_only=True)
class Trained:
    """An episode as training had it: the log-probs of its tokens in rising order, and the oldest version of one."""

    step: int
    ordinal: int
    sample: int
    score: float
    rows: int = 0
    log_probs: list[float] = field(default_factory=list)
    oldest: int = sys.maxsize


def episodes_of(run: Path, step: int) -> list[Trained]:
    """Returns the episodes of a step's recorded batch."""
    batch = Recorded.read(run / "batches" / f"step-{step:06d}.safetensors").whole().batch
    found: dict[int, Trained] = {}
    for row, number in enumerate(batch["episode_id"].tolist()):
        new = Trained(step=step, ordinal=int(batch["ordinal"][row]), sample=number % SAMPLES, score=float(batch["scores"][row]))
        episode, mask = found.setdefault(number, new), batch["response_mask"][row].bool()
        episode.rows += 1
        episode.log_probs = sorted(episode.log_probs + batch["rollout_log_probs"][row][mask].tolist())
        episode.oldest = min(episode.oldest, int(batch["policy_version"][row][mask].min()))
    return list(found.values())


def audit(plan: Plan) -> None:
    """Compares the ledger, the batches, and what agent or application wrote down."""
    trained = [episode for step in range(1, plan.steps + 1) for episode in episodes_of(plan.folder / "run", step)]
    rows = Counter(episode.rows for episode in trained)
    plan.numbers |= {
        "episodes trained": len(trained),
        "trajectories of an episode": {f"{n}:": c for n, c in sorted(rows.items())},
    }
    plan.numbers["oldest token"] = f"{max(episode.step - 1 - episode.oldest for episode in trained)} versions"
    plan.problems += [
        f"step {episode.step} trained prompt {episode.ordinal} with tokens {age} versions old, expected {STALENESS} at most"
        for episode in trained
        if (age := episode.step - 1 - episode.oldest) > STALENESS
    ]
    if places := [place for place, count in Counter((one.ordinal, one.sample) for one in trained).items() if count > 1]:
        plan.problems.append(f"episodes {places[:5]} trained twice")
    found = online.Found()
    if plan.name == "online":
        online.audit(plan.check, found)
    else:
        batches = [DataProto.load_from_disk(path) for path in sorted((plan.folder / "run" / "batches").glob("step-*"))]
        online.ledger(plan.check, batches, found)
    plan.problems += found.problems
    plan.numbers |= found.numbers
    known = events_of(plan)
    matched = [(episode, source) for episode in trained if (source := attempt_of(plan, episode, known)) is not None]
    if plan.name != "online":
        audit_attempts(plan, matched, known)


Attempts = dict[tuple[int, int], list[dict[str, Any]]]
"""The lines of the attempts of each episode, by ordinal and sample."""


def events_of(plan: Plan) -> Attempts:
    """Returns the lines of the agent, or of the application in the same form."""
    file = plan.check.log if plan.name == "online" else plan.folder / "attempts.jsonl"
    known: Attempts = {}
    for event in map(json.loads, file.read_text().splitlines()):
        if "sample" in event:
            known.setdefault((event.get("prompt", event.get("ordinal")), event["sample"]), []).append(event)
    kinds = Counter(event["event"] for events in known.values() for event in events)
    plan.numbers["of agent or application"] = kinds
    return known


def attempt_of(plan: Plan, episode: Trained, known: Attempts) -> dict[str, Any] | None:
    """Returns the last attempt that has the tokens and the reward of this episode."""
    name = f"episode {episode.ordinal}-{episode.sample}"
    events = [event for event in known.get((episode.ordinal, episode.sample), []) if "reward" in event]
    completed = [event for event in events if has_tokens(episode, event)]
    rewarded = [event for event in completed if same([event["reward"]], [episode.score])]
    if not rewarded:
        told = [event["reward"] for event in completed] or "nothing with these tokens"
        plan.problems.append(f"{name} trained with {episode.score}; it was given {told}")
        return None
    return rewarded[-1]


def has_tokens(episode: Trained, event: dict[str, Any]) -> bool:
    """Returns whether the attempt got the tokens that trained, all of them and no others."""
    return same(sorted(event["log_probs"]), episode.log_probs) and episode.rows == event.get("conversations", CONVERSATIONS)


def audit_attempts(plan: Plan, matched: Sequence[tuple[Trained, dict[str, Any]]], known: Attempts) -> None:
    """Compares the ledger's failures with those before the attempts that trained."""
    failures = sum(failures_before(plan, episode, source["seed"], known) for episode, source in matched)
    prompts = {episode.ordinal for episode, _ in matched}
    failures += (RETRIES + 1) * (len(prompts) * SAMPLES - len(matched))
    state = json.loads((plan.folder / "run" / f"global_step_{plan.steps}" / "rollouts.json").read_text())["executor"]["ledger"]
    failures += sum(count for _, count in state["attempts"])
    counted = state["retries"] + state["failed_episodes"]
    others = set(range(state["next_ordinal"])) - prompts - {ordinal for ordinal, _ in state["open"]}
    unknown = len({seed for (ordinal, _), events in known.items() if ordinal in others for seed in failed(events)})
    plan.numbers["failed attempts"] = (
        f"{counted} in the ledger, {failures} of what trained or is open, {unknown} of other prompts"
    )
    if not failures <= counted <= failures + unknown:
        plan.problems.append(
            f"the ledger counts {counted} failed attempts, expected {failures} (and {unknown} at most of others)"
        )


def failures_before(plan: Plan, episode: Trained, seed: int, known: Attempts) -> int:
    """Returns the number of failed attempts before the one with this seed, which trained."""
    item = PromptItem(prompt_ids=(), ordinal=episode.ordinal)
    seeds = [episode_data(plan.seed, item, episode.sample, None, attempt).seed for attempt in range(RETRIES + 1)]
    number = seeds.index(seed)
    if not failed(known[episode.ordinal, episode.sample]).issuperset(seeds[:number]):
        plan.problems.append(f"episode {episode.ordinal}-{episode.sample}: its attempt {number} came without {number} failures")
    return number


def failed(events: Sequence[dict[str, Any]]) -> set[int]:
    """Returns the seeds of the attempts that failed."""
    return {event["seed"] for event in events if event["event"] == "failed"}


def same(one: Sequence[float], other: Sequence[float]) -> bool:
    """Returns whether these are the same numbers up to their rounding to float32."""
    return len(one) == len(other) and all(abs(a - b) < TOLERANCE for a, b in zip(one, other, strict=True))


# The program.


def carry_out(plan: Plan) -> bool:
    """Runs a job and its audit; returns whether the outcome is as it must be."""
    began = time.monotonic()
    plan.folder.mkdir(parents=True, exist_ok=True)
    console.print(f"{plan.name}: {plan.steps} steps, {len(plan.kills)} kills, {plan.folder}")
    os.environ[BROKEN] = plan.broken
    if plan.name == "online":
        check = plan.check
        arguments = [*check.arguments(), *cluster(plan)]  # writes the key too
        application = online.start_application(check, f"--conversations={CONVERSATIONS}")
        try:
            run(plan, arguments)
        finally:
            application.terminate()
            application.wait(END_S)
    else:
        run(plan, [*agents(plan), *(policy(plan) if plan.name == POLICY else ())])
    if not plan.problems:
        audit(plan)
    if not plan.problems and plan.name == POLICY:
        audit_policy(plan)
    plan.numbers["seconds"] = f"{time.monotonic() - began:.0f}"
    return show(plan)


def show(plan: Plan) -> bool:
    """Prints what was found; returns whether it is what the job, or its control, must give."""
    kills = Table("kill", "happened", "s until the last of its processes ended", title=f"{plan.name}, {plan.lives} lives")
    for kill in plan.kills:
        kills.add_row(kill.target, kill.happened, "" if kill.target == "replica" else f"{kill.seconds:.0f}")
    numbers = Table("number", "value")
    for name, value in plan.numbers.items():
        numbers.add_row(
            name, ", ".join(f"{key} {count}" for key, count in value.items()) if isinstance(value, dict) else str(value)
        )
    console.print(kills, numbers)
    for problem in plan.problems[:6]:
        console.print(f"problem: {problem}")
    if plan.broken:
        caught = any(FAULTS[plan.broken] in problem for problem in plan.problems)
        console.print(f"{plan.broken}: {'caught, as it must be' if caught else 'NOT CAUGHT'}")
        return caught
    console.print("FAILED" if plan.problems else f"{plan.name}: all as it must be")
    return not plan.problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=("both", *KILLED, POLICY), default="both")
    parser.add_argument("--kills", type=int, default=12, help="of each job (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the run and of the moments (default: %(default)s)")
    parser.add_argument("--broken", choices=("", *FAULTS), default="", help="control: a fault that the audit must find")
    parser.add_argument(
        "--backend", choices=("ray", "local"), default="ray", help="local: one process, so that the driver is killed"
    )
    parser.add_argument("--folder", type=Path, help="where the jobs write")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="exactly-once-"))
    targets, good = TARGETS if given.backend == "ray" else TARGETS[:1], True
    common = {name: getattr(given, name) for name in ("seed", "broken", "backend")}
    for name in KILLED if given.job == "both" else (given.job,):
        kills = [] if name == POLICY else draw(given.kills, given.seed, targets)
        for kill in kills if given.broken else ():
            kill.steps += SAVED  # faults of a resume need a checkpoint
        good &= carry_out(Plan(name=name, folder=folder / name, kills=kills, **common))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
