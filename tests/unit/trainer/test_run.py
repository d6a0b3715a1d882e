"""A run's lines of metrics: in order, each once, also where a step's validation is done later than the next steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhub.checkpoint.store import Checkpoint
from rlhub.config.trainer import TrainerConfig
from rlhub.errors import ConfigError, NonFiniteError, RewardError
from rlhub.tracking.metrics_log import read_metrics
from rlhub.tracking.tracker import Metrics
from rlhub.trainer.run import Run


class Late:
    """Metrics that are there when somebody says so, or when somebody waits."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.ready, self.error = False, error

    def done(self) -> bool:
        return self.ready

    def result(self) -> Metrics:
        if self.error is not None:
            raise self.error
        return {"val/pass@1": 0.5}


def run_of(folder: Path) -> Run:
    return Run(TrainerConfig(default_local_dir=str(folder), logger=[], save_freq=3), {}, 4)


def end(run: Run, step: int, late: Late | None = None, *, last: bool = False) -> None:
    run.begin_step(step)
    run.end_step(step, {"reward/mean": float(step)}, save=lambda folder: [], state=dict, last=last, late=late)


def steps(run: Run) -> list[int]:
    return [row["step"] for row in read_metrics(run.folder.metrics)]


def test_lines_wait_for_a_late_one_and_stay_in_order(tmp_path: Path) -> None:
    with run_of(tmp_path / "run") as run:
        run.start()
        late = Late()
        end(run, 1, late)
        end(run, 2)
        assert steps(run) == []
        late.ready = True
        end(run, 3)  # saves
        end(run, 4, Late(), last=True)
        assert steps(run) == [1, 2, 3, 4]
        rows = read_metrics(run.folder.metrics)
        assert ["val/pass@1" in row for row in rows] == [True, False, False, True]
        newest = run.store.latest()
        assert newest is not None and newest.state["metrics"]["val/pass@1"] == 0.5, "a checkpoint holds its step's metrics"


def test_a_save_waits_for_what_is_late(tmp_path: Path) -> None:
    with run_of(tmp_path / "run") as run:
        run.start()
        end(run, 1, Late())
        end(run, 3)
        assert steps(run) == [1, 3]


def test_an_error_of_what_is_late_ends_the_run(tmp_path: Path) -> None:
    with run_of(tmp_path / "run") as run:
        run.start()
        end(run, 1, Late(error=RewardError("no scores")))
        with pytest.raises(RewardError, match="no scores"):
            end(run, 2, last=True)


def test_going_on_under_other_settings_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The folder's default name is one for all experiments: a run of another model must not go on unseen."""

    def said(model: str, steps: int) -> str:
        caplog.clear()
        trainer = TrainerConfig(default_local_dir=str(tmp_path), logger=[], total_training_steps=steps)
        settings = {"model": {"path": model, "betas": (0.9, 0.999)}, "trainer": {"total_training_steps": steps}}
        with Run(trainer, settings, steps) as run:
            if not run.already_finished:
                run.start()
                end(run, steps, last=True)
        return caplog.text

    assert "other settings" not in said("first", 1)
    assert "other settings" not in said("first", 2), "only longer"
    text = said("second", 2)
    assert "other settings (model.path: first -> second)" in text and "trainer.experiment_name" in text


def test_a_checkpoint_that_does_not_fit_is_refused_and_the_run_is_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before anything is said of going on; what checkpoints record is there to tell by."""

    def opened(rank: int) -> Run:
        def check(checkpoint: Checkpoint) -> None:
            if checkpoint.state["made"] != {"rank": rank}:
                raise ConfigError("another rank")

        settings = {"model": {"rank": rank}}
        return Run(
            TrainerConfig(default_local_dir=str(tmp_path), logger=[]), settings, 2, record={"made": {"rank": rank}}, check=check
        )

    with opened(4) as run:
        run.start()
        end(run, 1, last=True)
    written = run.folder.config.read_bytes()
    for _ in range(2):  # the lock was given back
        with pytest.raises(ConfigError, match="another rank"), opened(8):
            pass
    assert "It is this run that goes on" not in caplog.text and run.folder.config.read_bytes() == written
    with opened(4) as run:
        assert run.checkpoint is not None and run.checkpoint.step == 1


@pytest.mark.parametrize("skipped", [{"actor/skipped_steps": 2.0, "actor/optimizer_steps": 0.0}, {"train/skipped_steps": 1.0}])
def test_steps_in_a_row_that_are_skipped_end_the_run_which_is_saved(tmp_path: Path, skipped: dict[str, float]) -> None:
    """A coefficient of nan trained nothing, step after step, and the run ended well."""
    taken = {"actor/skipped_steps": 1.0, "actor/optimizer_steps": 1.0, "train/skipped_steps": 0.0}
    config = TrainerConfig(default_local_dir=str(tmp_path), logger=[], max_skipped_steps=2)

    def train(run: Run, step: int, metrics: dict[str, float]) -> None:
        run.begin_step(step)
        run.end_step(step, metrics, save=lambda folder: [], state=dict, last=False)

    with (
        pytest.raises(NonFiniteError, match=rf"2 training steps in a row were skipped.*/skipped_steps.*{tmp_path}/global_step_5"),
        Run(config, {}, 9) as run,
    ):
        run.start()
        for step, metrics in enumerate((skipped, taken, taken, skipped, skipped, taken), 1):
            train(run, step, metrics)
    assert run.store.steps() == [5] and steps(run) == [1, 2, 3, 4, 5]
    found = run.store.latest()
    assert found is not None and found.state["metrics"].items() >= skipped.items()
