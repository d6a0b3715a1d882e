"""Samples one episode of a recorded run again, token for token, and names the first difference.

    python scripts/replay_episode.py RUN_FOLDER 17-1              # sample 1 of prompt 17
    python scripts/replay_episode.py RUN_FOLDER 17-1 --seed 2     # control: the noise of another run
    python scripts/replay_episode.py RUN_FOLDER 17-1 --model global_step_9/actor/huggingface

The run must have been recorded (trainer.record_batches=True).  Each generation of the episode starts from the recorded tokens
before it, so that what tools, environments and applications wrote is taken as it was; the hf engine samples with the seed that
the run gave to this generation, and the weights of the version that sampled it, from its checkpoint (version 0: the run's
model).  A generation in whose middle the weights changed cannot be repeated with one checkpoint, and the tool says so.  An
episode that failed before has other seeds (--attempt); without the option all attempts are tried.

Exit status 0: the same tokens; 1: others; 2: the episode cannot be replayed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import yaml
from rich.console import Console
from rich.table import Table

from rlhub.agents.workflows.turns import turn_seed
from rlhub.checkpoint.store import CheckpointStore
from rlhub.config.load import interpret
from rlhub.config.rules.derive import resolve_device
from rlhub.config.sections.ppo import PPOConfig
from rlhub.engines.rollout.base import Completion, GenerationRequest, RolloutEngine, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine
from rlhub.errors import ConfigError, RlhubError
from rlhub.models.tokenizer import load_tokenizer, read_vocabulary
from rlhub.protocol import DataProto
from rlhub.rollout_service.executor.episode_groups import PromptItem, episode_data
from rlhub.tracking.run_folder import RunFolder
from rlhub.tracking.spans import Span, episode_lane, read_trace
from rlhub.trainer.ppo.episodes import TRAINING, samplings
from rlhub.trainer.ppo.offline_source import Recorded
from rlhub.workers.base import HF_FOLDER

SAME, DIFFERENT, IMPOSSIBLE = 0, 1, 2
SHOWN = 60  # characters of a text in the table
console = Console(width=150, markup=False)


@dataclass(slots=True, kw_only=True, frozen=True)
class Generation:
    """One generation of the record.  before: the tokens from which it starts; tokens, log_probs: what was sampled; version: that
    of the weights, None where they changed in its middle."""

    before: list[int]
    tokens: list[int]
    log_probs: list[float]
    version: int | None


@dataclass(slots=True, kw_only=True, frozen=True)
class Outcome:
    """What was sampled again.  position: the first token that differs, None where all are the same.  log_prob_error: the largest
    difference of a log-prob up to there."""

    sampled: Completion
    attempt: int
    request: int
    seconds: float
    position: int | None
    log_prob_error: float


@dataclass(slots=True, kw_only=True)
class Replay:
    """A recorded run.  attempts: of the episode, that are tried."""

    config: PPOConfig
    folder: Path
    ordinal: int
    sample: int
    seed: int
    attempts: Sequence[int]
    model: Path | None = None

    def generations(self) -> tuple[int, list[Generation]]:
        """Returns the step that trained the episode, and its generations.  Raises ConfigError where the record has none."""
        files = sorted((self.folder / "batches").glob("step-*.safetensors"))
        if not files:
            raise ConfigError(f"{self.folder}/batches: no recorded batches; train with trainer.record_batches=True")
        for path in files:
            recorded = Recorded.read(path)
            if bool((recorded.small.batch["ordinal"] == self.ordinal).any()):
                rows = self._rows(recorded.small)
                batch = recorded.whole()
                return int(path.stem.rpartition("-")[2]), [one for row in rows for one in generations_of(batch, row)]
        raise ConfigError(
            f"prompt {self.ordinal} is in none of the {len(files)} recorded batches; prompts.jsonl says how it ended"
        )

    def _rows(self, batch: DataProto) -> list[int]:
        """Returns the rows of the episode.  Samples that failed count in episode_id, and have no rows."""
        ordinals, n = batch.batch["ordinal"], self.config.actor_rollout_ref.rollout.n
        rows = torch.nonzero(ordinals == self.ordinal).flatten().tolist()
        if "episode_id" in batch.batch.keys():
            found = [row for row in rows if int(batch.batch["episode_id"][row]) % n == self.sample]
        else:
            found = rows[self.sample : self.sample + 1]
        if not found:
            raise ConfigError(f"prompt {self.ordinal} trained without a sample {self.sample}: it failed, or rollout.n is {n}")
        return found

    def weights(self, version: int) -> Path:
        """Returns the folder of the weights of this version.  Raises ConfigError where they are gone."""
        if self.model is not None:
            return self.model if self.model.is_dir() else self.folder / self.model
        if version == 0:
            return Path(self.config.actor_rollout_ref.model.path or "")
        store = CheckpointStore(self.folder)
        found = store.folder(version) / "actor" / HF_FOLDER
        if not found.is_dir():
            raise ConfigError(
                f"version {version} sampled it, and there is no checkpoint of step {version}: there are {store.steps()}; train "
                "with trainer.save_freq=1 and a larger trainer.max_actor_ckpt_to_keep, or name other weights with --model"
            )
        return found

    def engine(self, weights: Path) -> RolloutEngine:
        """Returns the hf engine with these weights."""
        part, data = self.config.actor_rollout_ref, self.config.data
        engine = build_rollout_engine(
            RolloutSetup(
                config=replace(part.rollout, name="hf"),
                model=replace(part.model, path=str(weights)),
                device=torch.device(resolve_device(self.config.trainer.device)),
                seed=self.seed,
                max_prompt_length=data.max_prompt_length,
                max_response_length=data.max_response_length,
                load_checkpoint=True,
            )
        )
        engine.initialize()
        return engine

    def seeds(self, number: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yields attempt, request and seed of generation `number` of `count`: its own first, then the others, because parallel
        conversations are recorded one after the other."""
        item = PromptItem(prompt_ids=(), ordinal=self.ordinal)
        for attempt in self.attempts:
            first = episode_data(self.seed, item, self.sample, None, attempt).seed
            for request in sorted(range(2 * count), key=lambda one: (one != number, one)):
                yield attempt, request, turn_seed(first, request)

    def outcome(self, engine: RolloutEngine, one: Generation, sampling: SamplingParams, place: tuple[int, int]) -> Outcome:
        """Samples a generation again; returns the outcome of the seed whose tokens agree for longest."""
        best: Outcome | None = None
        params = replace(sampling, max_new_tokens=len(one.tokens))
        for attempt, request, seed in self.seeds(*place):
            began = time.perf_counter()
            (sampled,) = engine.generate([GenerationRequest(prompt_ids=one.before, seed=seed)], params)
            found = compared(one, sampled, attempt, request, time.perf_counter() - began)
            if found.position is None:
                return found
            if best is None or found.position > (best.position or 0):
                best = found
        assert best is not None, "there is an attempt"
        return best


def generations_of(batch: DataProto, row: int) -> Iterator[Generation]:
    """Yields the generations of a row: its runs of tokens that the policy wrote."""
    columns = batch.batch
    start = columns["input_ids"].shape[1] - columns["responses"].shape[1]
    prompt = columns["input_ids"][row, :start][columns["attention_mask"][row, :start].bool()].tolist()
    length = int(columns["response_length"][row])
    tokens, mask = columns["responses"][row, :length].tolist(), columns["response_mask"][row, :length].tolist()
    versions = columns["policy_version"][row, :length].tolist()
    log_probs = columns["rollout_log_probs"][row, :length].tolist()
    edges = [at for at in range(length + 1) if bool(at < length and mask[at]) != bool(at > 0 and mask[at - 1])]
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        known = set(versions[begin:end])
        yield Generation(
            before=[*prompt, *tokens[:begin]],
            tokens=tokens[begin:end],
            log_probs=log_probs[begin:end],
            version=known.pop() if len(known) == 1 else None,
        )


def compared(one: Generation, sampled: Completion, attempt: int, request: int, seconds: float) -> Outcome:
    """Returns how far a completion agrees with the record."""
    pairs = list(zip(one.tokens, sampled.token_ids, strict=False))
    same = next((at for at, (old, new) in enumerate(pairs) if old != new), len(pairs))
    errors = [abs(old - new) for old, new in zip(one.log_probs[:same], sampled.log_probs[:same], strict=True)]
    return Outcome(
        sampled=sampled,
        attempt=attempt,
        request=request,
        seconds=seconds,
        position=None if same == len(one.tokens) else same,
        log_prob_error=max(errors, default=0.0),
    )


def replay(run: Replay) -> int:
    """Replays the episode, shows it, and returns the exit status."""
    step, generations = run.generations()
    tokenizer = load_tokenizer(run.config.actor_rollout_ref.model.path)
    sampling = samplings(run.config, read_vocabulary(run.config.actor_rollout_ref.model, tokenizer))[TRAINING]
    console.print(f"episode {run.ordinal}-{run.sample}, trained in step {step}, generations: {len(generations)}")
    table = Table(
        "generation", "version", "starts after", "tokens", "attempt, request", "s", "log-probs off by", "outcome", "text"
    )
    status, notes, engines = SAME, list[str](), dict[Path, RolloutEngine]()
    for number, one in enumerate(generations):
        text = shown(tokenizer, one.tokens)
        if one.version is None:
            table.add_row(str(number), "several", str(len(one.before)), str(len(one.tokens)), "", "", "", "not replayed", text)
            notes.append(f"generation {number} was sampled while the weights changed: no one checkpoint has sampled it")
            status = max(status, IMPOSSIBLE)
            continue
        weights = run.weights(one.version)
        engine = engines[weights] = engines.get(weights) or run.engine(weights)
        found = run.outcome(engine, one, sampling, (number, len(generations)))
        same = found.position is None
        where = [str(number), str(one.version), str(len(one.before)), str(len(one.tokens)), f"{found.attempt}, {found.request}"]
        table.add_row(*where, f"{found.seconds:.3f}", f"{found.log_prob_error:.1e}", "same" if same else "differs", text)
        if not same:
            notes.append(difference(tokenizer, number, one, found))
            status = max(status, DIFFERENT)
    console.print(table)
    for note in notes:
        console.print(note)
    show_timeline(run)
    console.print("the same tokens" if status == SAME else "NOT the same tokens" if status == DIFFERENT else "not all replayed")
    return status


def difference(tokenizer: Any, number: int, one: Generation, found: Outcome) -> str:
    """Returns the first difference of a generation in words."""
    at, sampled = found.position or 0, found.sampled
    old = f"{one.tokens[at]} {shown(tokenizer, one.tokens[at : at + 1])!r} (log-prob {one.log_probs[at]:.4f})"
    if at >= len(sampled.token_ids):
        new = f"the end ({sampled.finish_reason})"
    else:
        token = sampled.token_ids[at]
        new = f"{token} {shown(tokenizer, [token])!r} (log-prob {sampled.log_probs[at]:.4f})"
    return f"first difference: token {at} of generation {number}: the run sampled {old}, the replay {new}"


def shown(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Returns the text of tokens, cut."""
    text = str(tokenizer.decode(list(tokens), skip_special_tokens=False))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def show_timeline(run: Replay) -> None:
    """Shows when the run did what of the episode, where its trace has it."""
    lane = episode_lane(run.ordinal, run.sample)
    spans = [span for span in read_trace(RunFolder(run.folder).trace) if span.lane == lane]
    if not spans:
        console.print("its timeline was not kept: trace.json has the slowest episodes and some others")
        return
    first = min(span.start for span in spans)
    table = Table("from (s)", "seconds", "what", "details", title="timeline in the run")
    for span in sorted(spans, key=lambda one: one.start):
        table.add_row(f"{span.start - first:.3f}", f"{span.end - span.start:.3f}", span.name, details(span))
    console.print(table)


def details(span: Span) -> str:
    """Returns a span's arguments as text."""
    return ", ".join(f"{name} {value}" for name, value in span.args.items())


def config_of(folder: Path) -> PPOConfig:
    """Returns the configuration of a run.  Raises ConfigError where the folder has none."""
    path = RunFolder(folder).config
    if not path.is_file():
        raise ConfigError(f"{folder}: no run folder (it has no {path.name})")
    problems: list[str] = []
    loaded = interpret(PPOConfig, yaml.safe_load(path.read_text(encoding="utf-8")), problems)
    if loaded.problems:
        raise ConfigError(loaded.problems)
    return loaded.config


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run folder (trainer.default_local_dir)")
    parser.add_argument("episode", help="prompt and sample, such as 17-1")
    parser.add_argument("--attempt", type=int, help="how often the episode had failed before (default: tried in turn)")
    parser.add_argument("--seed", type=int, help="of the run (default: its own)")
    parser.add_argument("--model", type=Path, help="folder of other weights, below the run folder or anywhere")
    given = parser.parse_args(arguments)
    try:
        ordinal, sample = (int(part) for part in given.episode.split("-"))
    except ValueError:
        parser.error(f"episode {given.episode!r}: expected prompt and sample, such as 17-1")
    try:
        config = config_of(given.run)
        retries = config.actor_rollout_ref.rollout.agent.episode_retries
        return replay(
            Replay(
                config=config,
                folder=given.run,
                ordinal=ordinal,
                sample=sample,
                seed=config.trainer.seed if given.seed is None else given.seed,
                attempts=range(retries + 1) if given.attempt is None else [given.attempt],
                model=given.model,
            )
        )
    except RlhubError as error:
        console.print(f"error: {error}")
        return IMPOSSIBLE


if __name__ == "__main__":
    sys.exit(main())
