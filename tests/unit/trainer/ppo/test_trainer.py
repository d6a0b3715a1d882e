"""The fit loop: what happens when around the steps, and that weights are published by the step and by validation alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhub.config.sections.ppo import PPOConfig
from rlhub.data.samplers import SamplerData, UniformSampler
from rlhub.trainer.ppo.trainer import PPOTrainer
from rlhub.trainer.ppo.validation import ValidationReport


@dataclass
class Recorded:
    """All that the loop calls, in order; the run, the step, its source and validation in one."""

    calls: list[str] = field(default_factory=list)
    policy_version: int = 0
    published: int | None = None
    checkpoint: Any = None
    stop_requested: bool = False
    stops_in: int | None = None

    # The source.

    def publish(self) -> None:
        if self.published != self.policy_version:
            self.published = self.policy_version
            self.calls.append(f"publish {self.published}")

    def trained(self, step: int) -> None:
        self.calls.append(f"trained {step}")
        self.policy_version = step

    def load_state(self, state: Any, folder: Path) -> None:
        self.policy_version = state["policy_version"]

    def save(self, folder: Path) -> list[Any]:
        return []

    def state(self) -> dict[str, Any]:
        return {"policy_version": self.policy_version}

    # The step.

    def take_step(self, step: int, prompts: Iterator[Any]) -> dict[str, float]:
        self.publish()
        self.calls.append(f"train {step}")
        self.stop_requested = step == self.stops_in
        return {}

    # Validation.

    def begin(self, version: int) -> Future[ValidationReport]:
        assert version == self.published, "a version is validated that nobody has"
        self.calls.append(f"validate {version}")
        done: Future[ValidationReport] = Future()
        done.set_result(ValidationReport(metrics={"val/pass@1": 1.0}))
        return done

    # The run.

    def begin_step(self, step: int) -> None:
        self.calls.append(f"begin {step}")

    def end_step(self, step: int, metrics: Any, *, save: Callable[[Path], Any], state: Any, last: bool, late: Any) -> None:
        assert metrics["training/policy_version"] == step and (late is None or late.done())
        if last:
            save(Path())
            self.calls.append(f"save {state()['policy_version']}")

    def due(self, frequency: int, step: int, *, last: bool) -> bool:
        return frequency > 0 and (step % frequency == 0 or last)

    def log(self, step: int, metrics: Any) -> None:
        self.calls.append(f"log {step}")

    def log_generations(self, step: int, rows: Any) -> None: ...


class FakeStep:
    """The training step with its parts."""

    def __init__(self, recorded: Recorded) -> None:
        self.source = recorded
        self.kl_controller = SimpleNamespace(value=0.1)

    def __call__(self, step: int, prompts: Iterator[Any]) -> dict[str, float]:
        return self.source.take_step(step, prompts)


def calls_of(recorded: Recorded, *, steps: int, test_freq: int = -1, validates: bool = True) -> list[str]:
    config = PPOConfig()
    config.trainer.test_freq = test_freq
    groups = SimpleNamespace(load=lambda folder: None, save=lambda folder: [])
    trainer = PPOTrainer(
        config=config,
        run=recorded,  # type: ignore[arg-type]
        loader=SimpleNamespace(endless=lambda: iter(()), epoch=0, sampler=UniformSampler(SamplerData(num_rows=1))),  # type: ignore[arg-type]
        train_step=FakeStep(recorded),  # type: ignore[arg-type]
        validation=recorded if validates else None,
        groups=groups,  # type: ignore[arg-type]
        total_steps=steps,
    )
    trainer.fit()
    return recorded.calls


def test_each_step_publishes_what_the_one_before_has_trained_and_the_last_nothing() -> None:
    assert calls_of(Recorded(), steps=3, validates=False) == [
        "begin 0",
        *("begin 1", "publish 0", "train 1", "trained 1"),
        *("begin 2", "publish 1", "train 2", "trained 2"),
        *("begin 3", "publish 2", "train 3", "trained 3"),
        "save 3",
    ]


def test_a_validation_has_the_newest_weights_which_the_next_step_need_not_publish() -> None:
    assert calls_of(Recorded(), steps=2, test_freq=1) == [
        *("begin 0", "publish 0", "validate 0", "log 0"),
        *("begin 1", "train 1", "trained 1", "publish 1", "validate 1"),
        *("begin 2", "train 2", "trained 2", "publish 2", "validate 2"),
        "save 2",
    ]


def test_a_resumed_run_begins_with_the_version_of_its_checkpoint() -> None:
    checkpoint = SimpleNamespace(step=5, path=Path(), state={"policy_version": 5, "kl_coef": 0.3})
    assert calls_of(Recorded(checkpoint=checkpoint), steps=6) == ["begin 6", "publish 5", "train 6", "trained 6", "save 6"]


@pytest.mark.parametrize("stops_in", [1, 2])
def test_the_step_after_which_a_run_stops_is_saved(stops_in: int) -> None:
    calls = calls_of(Recorded(stops_in=stops_in), steps=9)
    assert calls[-2:] == [f"trained {stops_in}", f"save {stops_in}"]
