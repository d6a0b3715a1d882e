"""A run's lines of metrics stand in order, each once, also where a step's validation is done later than the next steps.

Stop signals, the limit on skipped steps, a lost folder and a killed run's report.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhub.checkpoint.files import FileEntry
from rlhub.checkpoint.store import Checkpoint
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.errors import CheckpointError, ConfigError, NonFiniteError, RewardError, RunFolderError
from rlhub.single_controller import ObservedCall, WorkerInfo
from rlhub.tracking.metrics_log import read_metrics
from rlhub.tracking.tracker import Metrics
from rlhub.trainer.run import Run, StopSignals


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


def test_throughput_is_per_second_and_device_of_all_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1200 tokens in 4 s, on 2 machines of 4 ranks and a pool of 2."""
    config = TrainerConfig(default_local_dir=str(tmp_path / "run"), logger=[], nnodes=2, n_gpus_per_node=4)
    config.pools = {"generation": {"n_gpus_per_node": 2}}
    now = iter([100.0, 104.0, 104.0, 104.0, 104.0, 104.0])
    with Run(config, {}, 4) as run:
        run.start()
        monkeypatch.setattr("rlhub.trainer.run.time.perf_counter", lambda: next(now))
        run.begin_step(1)
        run.end_step(1, {"perf/total_num_tokens": 1200.0}, save=lambda folder: [], state=dict, last=False)
        monkeypatch.undo()
        (row,) = read_metrics(run.folder.metrics)
    assert row["timing_s/step"] == row["perf/time_per_step"] == 4.0
    assert row["perf/throughput"] == pytest.approx(1200 / (4 * 10))


def test_a_steps_line_has_the_traffic_of_its_calls_and_of_its_save(tmp_path: Path) -> None:
    config = TrainerConfig(default_local_dir=str(tmp_path / "run"), logger=[])
    call = ObservedCall(role="actor", method="save_checkpoint", blocking=True, workers=(WorkerInfo(rank=0, node="n", pid=1),))

    def save(folder: Path) -> list[FileEntry]:
        run.calls.on_start(call)
        run.calls.on_transfer(call, sent=5, received=7)
        return []

    with Run(config, {}, 2) as run:
        run.calls.on_transfer(call, sent=1000)  # before the first step
        run.start()
        for step in (1, 2):
            run.begin_step(step)
            run.calls.on_transfer(call, sent=10 * step)
            run.end_step(step, {}, save=save, state=dict, last=step == 2)
        rows = read_metrics(run.folder.metrics)
    names = ("perf/driver_bytes_out", "perf/driver_bytes_in", "perf/driver_calls")
    assert [[row[name] for name in names] for row in rows] == [[10, 0, 0], [25, 7, 1]]


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


def test_a_folder_that_was_removed_under_a_run_ends_it_at_the_next_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(RunFolderError, match="was removed while the run used it"), run_of(folder) as run:
        run.start()
        end(run, 1)
        shutil.rmtree(folder)
        end(run, 2)
    assert not folder.exists(), "nothing is made at its path again"


def test_a_folder_that_was_moved_under_a_run_is_as_the_run_left_it(tmp_path: Path) -> None:
    """Also where another run has begun at the old path since."""
    with pytest.raises(RunFolderError, match=f"was moved to {tmp_path}/other"), run_of(tmp_path / "run") as run:
        run.start()
        end(run, 1)
        (tmp_path / "run").rename(tmp_path / "other")
        with run_of(tmp_path / "run") as second:
            second.start()
            end(second, 1)
            end(run, 2, last=True)
    assert [row["step"] for row in read_metrics(tmp_path / "other" / "metrics.jsonl")] == [1]
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1]
    with run_of(tmp_path / "other") as again:
        assert again.checkpoint is None


def test_a_folder_that_has_gone_explains_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """Within a step: what writes there has no word for it."""
    with pytest.raises(RunFolderError, match="was removed") as caught, run_of(tmp_path / "run") as run:
        run.start()
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run" / "prompts.jsonl").write_text("")
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_full_disk_is_an_error_that_names_the_folder_and_the_remedy(tmp_path: Path) -> None:
    """Whatever could not be written: samples, a trained prompt, the report."""
    with (
        pytest.raises(RunFolderError, match=f"{tmp_path}/run: the disk is full .*it goes on from its last checkpoint") as caught,
        run_of(tmp_path / "run") as run,
    ):
        run.start()
        end(run, 1)
        Path("/dev/full").write_text("a sample")
    assert isinstance(caught.value.__cause__, OSError)


def test_a_report_that_finds_no_room_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunFolderError, match="the disk is full"), run_of(tmp_path / "run") as run:
        run.start()
        assert run.recorder is not None
        monkeypatch.setattr(run.recorder, "finish", lambda *_, **__: Path("/dev/full").write_text("the report"))


def test_the_report_of_a_killed_run_does_not_stay_running(tmp_path: Path) -> None:
    """The next start corrects it, even one that does not get far."""
    code = (
        "import os, sys; from pathlib import Path; from tests.unit.trainer.test_run import end, run_of\n"
        "run = run_of(Path(sys.argv[1])).__enter__(); run.start(); end(run, 1)\n"
        "run.recorder._write_report('running'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=False).returncode == -9
    report = tmp_path / "run" / "report.html"
    assert 'class="badge running" data-written=' in report.read_text(), "the page tells how old it is"

    def refuse(checkpoint: Checkpoint | None) -> None:
        raise ConfigError("no")

    refused = run_of(tmp_path / "run")
    refused._find_checkpoint = lambda: refuse(None)  # type: ignore[assignment, method-assign, func-returns-value]
    with pytest.raises(ConfigError), refused:
        pass
    text = report.read_text()
    assert 'class="badge running' not in text and "ended without a word" in text and ">failed<" in text
    with run_of(tmp_path / "run") as run:
        run.start()
        text = report.read_text()
        assert 'class="badge running' in text and "ended without a word" not in text


def test_starting_anew_in_a_checkout_moves_nothing(tmp_path: Path) -> None:
    """trainer.default_local_dir=. where the user's work is."""
    for name in (".git/HEAD", "src/model.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    config = TrainerConfig(default_local_dir=str(tmp_path), resume_mode="disable", logger=[])
    with pytest.raises(RunFolderError, match="holds no run"), Run(config, {}, 1):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".git", "src"]


def test_a_run_of_which_no_checkpoint_is_whole_is_not_begun_anew_over_it(tmp_path: Path) -> None:
    with run_of(tmp_path / "run") as run:
        run.start()
        end(run, 1)
        end(run, 2, last=True)
    manifest = tmp_path / "run" / "global_step_2" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 5'))
    with (
        pytest.raises(CheckpointError, match=r"no whole checkpoint, only global_step_2.*resume_mode=disable"),
        run_of(tmp_path / "run"),
    ):
        pass
    assert steps(run) == [1, 2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_a_request(number: signal.Signals) -> None:
    former = signal.getsignal(number)
    with StopSignals() as stop:
        assert not stop.requested and stop.exit_code == 0
        stop.defer()
        os.kill(os.getpid(), number)
        assert stop.requested and stop.exit_code == 128 + number
    assert signal.getsignal(number) is former


def test_the_second_interrupt_stops_at_once() -> None:
    with StopSignals() as stop, pytest.raises(KeyboardInterrupt):
        stop.defer()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_before_the_first_step_a_signal_stops_at_once(number: signal.Signals, raised: type[BaseException]) -> None:
    with StopSignals() as stop:
        with pytest.raises(raised):
            os.kill(os.getpid(), number)
        assert stop.requested and stop.exit_code == 128 + number
