"""Trains on sessions that an application drives over HTTP, while connections break, requests repeat and the driver is killed.

    python scripts/checks/online.py --episodes 200 --kills 2
    python scripts/checks/online.py --rewards shuffled      # control: the reward must not rise
    python scripts/checks/online.py --twice      # control: an endpoint that counts repeated rewards and answers twice is caught

The application (`online_application.py`) is a process of its own that knows only HTTP.  Of its sessions 10 % each lose the
connection in the middle of a request or before they have read its answer, repeat every request, and are left without an end;
rewards are the share of letters in the answers of a tiny model.  The driver gets SIGKILL and is started again with the same
command.

Asserted: every prompt ended exactly once and those that trained are in the batches; the rewards that trained are, place by place,
those that the application was told are accepted, and their sums agree; repeated requests were answered as the first ones, and a
chat whose answer was lost and asked for again trains once; and the mean reward rises by 0.2 from the first to the last quarter of
the steps.  Exit status 1 where anything is not so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console
from rich.table import Table

from rlhub.protocol import DataProto
from rlhub.utils.ports import free_port
from scripts.checks import jobs
from scripts.checks.jobs import Job, Task

BATCH, SAMPLES = 5, 4
AGENT = "actor_rollout_ref.rollout.agent"
TIMEOUT_S = 4.0
RUN_S, END_S = 500.0, 60.0
RISE = 0.2
TOLERANCE = 1e-6
APPLICATION = Path(__file__).with_name("online_application.py")
COUNTS_TWICE = "scripts.checks.online_twice"
console = Console(width=150, markup=False)


@dataclass(slots=True, kw_only=True)
class Check:
    """The settings of a run and where it writes.  conversations: of a session."""

    folder: Path
    episodes: int = 200
    kills: int = 2
    rewards: str = "own"
    twice: bool = False
    seed: int = 1
    conversations: int = 1
    port: int = field(default_factory=free_port)

    @property
    def steps(self) -> int:
        """Returns the number of steps that train so many episodes."""
        return -(-self.episodes // (BATCH * SAMPLES))

    @property
    def run(self) -> Path:
        """Returns the run folder."""
        return self.folder / "run"

    @property
    def log(self) -> Path:
        """Returns the application's log."""
        return self.folder / "application.jsonl"

    def arguments(self) -> list[str]:
        """Returns the command line of the job."""
        task = Task(folder=self.folder / "task").write()
        (self.folder / "key").write_text("a key of the application's\n")
        more = [
            *jobs.ASYNC,
            f"data.train_files={task.folder / 'chats.parquet'}",
            f"data.train_batch_size={BATCH}",
            "data.max_prompt_length=120",
            "data.max_response_length=40",
            f"actor_rollout_ref.model.path={task.folder / 'chat'}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            f"actor_rollout_ref.rollout.n={SAMPLES}",
            f"{AGENT}.default_agent_loop=online",
            f"{AGENT}.episode_retries=6",
            f"{AGENT}.kwargs.port={self.port}",
            f"{AGENT}.kwargs.key_file={self.folder / 'key'}",
            f"{AGENT}.kwargs.session_timeout_s={TIMEOUT_S}",
            f"trainer.total_training_steps={self.steps}",
            f"trainer.seed={self.seed}",
        ]
        if self.twice:
            more.append(f"trainer.plugins=[{COUNTS_TWICE}]")
        return task.arguments(self.run, *more, deadline_s=120.0)


@dataclass(slots=True, kw_only=True)
class Found:
    """What a run left.  problems: none if all is as it should be."""

    problems: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    qualities: list[float] = field(default_factory=list)


def drive(check: Check) -> Found:
    """Runs the job and the application, with the kills between; returns what the audit found."""
    arguments, found = check.arguments(), Found()
    application = start_application(check)
    try:
        for number in range(check.kills + 1):
            last = number == check.kills
            until = check.steps if last else (number + 1) * check.steps // (check.kills + 1)
            job = start_job(check, arguments, number)
            console.print(f"driver {number}: until {'the end' if last else f'after step {until}'}")
            if problem := kill_after(job, None if last else until):
                return Found(problems=[f"{problem} (logs in {check.folder})"])
    finally:
        application.send_signal(signal.SIGTERM)
        application.wait(END_S)
    audit(check, found)
    return found


def start_application(check: Check, *options: str) -> subprocess.Popen[bytes]:
    """Starts the application, with more options of its command line."""
    command = [sys.executable, str(APPLICATION), f"http://127.0.0.1:{check.port}", str(check.folder / "key"), str(check.log)]
    more = [f"--seed={check.seed}", f"--rewards={check.rewards}", f"--left-s={2 * TIMEOUT_S}", *options]
    with (check.folder / "application.err").open("wb") as errors:
        return subprocess.Popen([*command, *more], stderr=errors)


def start_job(check: Check, arguments: Sequence[str], number: int) -> Job:
    """Starts the job; its own folder is on the path of its plugins."""
    return jobs.start(arguments, check.run, check.folder / f"driver-{number}.log")


def kill_after(job: Job, step: int | None) -> str:
    """Kills the driver some time after this step; None: waits for its end.  Returns the problem, or ""."""
    try:
        if step is None:
            code = job.wait(RUN_S)
            return "" if code == 0 else f"the last driver ended with {code}: {job.output[-2000:]}"
        if not job.until(lambda: step in job.steps(), RUN_S):
            return f"step {step} did not come: {job.output[-2000:]}"
        time.sleep(0.3)  # in the middle of the next one
        job.process.send_signal(signal.SIGKILL)
        if (code := job.wait(END_S)) != -signal.SIGKILL:
            return f"the driver ended with {code} before it was killed: {job.output[-2000:]}"
        left = job.ends_within(END_S)
        return f"outlived the driver: {left}" if left else ""
    finally:
        job.end()


def audit(check: Check, found: Found) -> None:
    """Compares what trained with what the application was told."""
    batches = [DataProto.load_from_disk(check.run / "batches" / f"step-{step:06d}.safetensors") for step in every_step(check)]
    ledger(check, batches, found)
    events = [json.loads(line) for line in check.log.read_text().splitlines()]
    found.problems += [event["problem"] for event in events if "problem" in event]
    kinds = Counter(event["kind"] for event in events if event["event"] == "open")
    found.numbers["sessions"] = {"opened": sum(kinds.values()), **kinds}
    ends = [event for event in events if event["event"] in ("completed", "unknown")]
    trained_sum = accepted_sum = 0.0
    for batch in batches:
        prompts = rewards_of(batch)
        found.problems += repeated(batch, check.conversations)
        step_quality = []
        for ordinal, trained in prompts.items():
            chosen = matching(trained, [event for event in ends if event["prompt"] == ordinal])
            if chosen is None:
                accepted = [event["reward"] for event in ends if event["prompt"] == ordinal]
                found.problems.append(f"prompt {ordinal} trained with {trained}, but the application was told of {accepted}")
                continue
            trained_sum += sum(trained)
            accepted_sum += sum(event["reward"] for event in chosen)
            step_quality += [event["quality"] for event in chosen]
        found.qualities.append(sum(step_quality) / max(len(step_quality), 1))
    found.numbers["sum of rewards that trained"] = f"{trained_sum:.6f}"
    found.numbers["sum of rewards accepted"] = f"{accepted_sum:.6f}"


def rewards_of(batch: DataProto) -> dict[int, list[float]]:
    """Returns the rewards of each prompt's episodes, in rising order.  Several trajectories of an episode have one reward."""
    columns = {name: batch.batch[name].tolist() for name in ("scores", "ordinal")}
    episodes = batch.batch["episode_id"].tolist() if "episode_id" in batch.batch else range(len(batch))
    once = {
        number: (ordinal, score) for number, ordinal, score in zip(episodes, columns["ordinal"], columns["scores"], strict=True)
    }
    found: dict[int, list[float]] = {}
    for ordinal, score in sorted(once.values()):
        found.setdefault(ordinal, []).append(score)
    return found


def repeated(batch: DataProto, conversations: int) -> list[str]:
    """Returns the problems of episodes that have more trajectories than their application had conversations."""
    episodes = batch.batch["episode_id"].tolist() if "episode_id" in batch.batch else range(len(batch))
    prompts = dict(zip(episodes, batch.batch["ordinal"].tolist(), strict=True))
    return [
        f"an episode of prompt {prompts[episode]} had {conversations} conversations and trained on {count}"
        for episode, count in Counter(episodes).items()
        if count > conversations
    ]


def matching(trained: Sequence[float], ends: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Returns the end of each place whose reward trained: its last one that the application knows to be accepted, or a later one
    whose answer it did not get; None where these are not the rewards that trained."""
    places: dict[int, list[dict[str, Any]]] = {}
    for event in ends:
        known = event["event"] == "completed"
        places[event["sample"]] = [event] if known else [*places.get(event["sample"], []), event]
    for chosen in itertools.product(*places.values()):
        rewards = sorted(event["reward"] for event in chosen)
        same = len(rewards) == len(trained) and all(
            abs(one - other) < TOLERANCE for one, other in zip(rewards, trained, strict=True)
        )
        if same:
            return list(chosen)
    return None


def every_step(check: Check) -> range:
    """Returns the numbers of the steps."""
    return range(1, check.steps + 1)


def ledger(check: Check, batches: Sequence[DataProto], found: Found) -> None:
    """Compares the batches, the log of prompts and the last checkpoint's ledger."""
    trained = [ordinal for batch in batches for ordinal in dict.fromkeys(batch.batch["ordinal"].tolist())]
    rows = [json.loads(line) for line in (check.run / "prompts.jsonl").read_text().splitlines()]
    ends = {row["ordinal"]: row["end"] for row in rows}
    open_now, begun = ledger_of(check)
    steps = [json.loads(line)["step"] for line in (check.run / "metrics.jsonl").read_text().splitlines()]
    facts = {
        "every step once": [step for step in steps if step] == list(every_step(check)),
        "no prompt trained twice": len(set(trained)) == len(trained) == check.steps * BATCH,
        "no prompt ended twice": len(ends) == len(rows),
        "the log of prompts names what trained": sorted(trained) == sorted(n for n, end in ends.items() if end == "trained"),
        "no prompt is lost": set(range(begun)) == set(ends) | open_now,
    }
    found.problems += [f"not so: {fact}" for fact, holds in facts.items() if not holds]
    found.numbers["prompts"] = {**Counter(ends.values()), "open": len(open_now)}


def ledger_of(check: Check) -> tuple[set[int], int]:
    """Returns the open prompts of the last checkpoint, and the number of prompts that were begun."""
    state = json.loads((check.run / f"global_step_{check.steps}" / "rollouts.json").read_text())["executor"]["ledger"]
    return {ordinal for ordinal, _ in state["open"]}, state["next_ordinal"]


def judge(check: Check, found: Found) -> bool:
    """Shows what was found; returns whether it is what the run, or its control, must give."""
    quarter = max(1, check.steps // 4)
    means = [sum(part) / len(part) if part else 0.0 for part in (found.qualities[:quarter], found.qualities[-quarter:])]
    table = Table("number", "value")
    for name, value in found.numbers.items():
        table.add_row(name, ", ".join(f"{key} {count}" for key, count in value.items()) if isinstance(value, dict) else value)
    table.add_row("share of letters by step", " ".join(f"{quality:.2f}" for quality in found.qualities))
    table.add_row("first and last quarter", f"{means[0]:.3f} {means[1]:.3f} ({means[1] - means[0]:+.3f})")
    console.print(table)
    for problem in found.problems[:10]:
        console.print(f"problem: {problem}")
    if check.twice:
        missed = [name for name in ("trained with", "and trained on") if not any(name in problem for problem in found.problems)]
        console.print(f"NOT CAUGHT: {missed}" if missed else "caught, rewards and answers, as it must be")
        return not missed
    rises = means[1] - means[0] >= RISE
    if rises != (check.rewards == "own"):
        console.print(f"FAILED: the share of letters {'rises' if rises else 'does not rise'} with {check.rewards} rewards")
        return False
    console.print("FAILED" if found.problems else "all as it must be")
    return not found.problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200, help="that train (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=2, help="of the driver (default: %(default)s)")
    parser.add_argument("--rewards", choices=("own", "shuffled"), default="own", help="shuffled: a session gets another's")
    parser.add_argument("--twice", action="store_true", help="let the endpoint count repeated rewards and answers twice")
    parser.add_argument("--seed", type=int, default=1, help="of the run and of the application's moods (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where job and application write")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="online-"))
    folder.mkdir(parents=True, exist_ok=True)
    check = Check(
        folder=folder,
        episodes=given.episodes,
        kills=given.kills,
        rewards=given.rewards,
        twice=given.twice,
        seed=given.seed,
    )
    began = time.monotonic()
    good = judge(check, drive(check))
    console.print(f"{time.monotonic() - began:.0f} s, {folder}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
