"""What recipes of several stages share: their command line, stages that are skipped when done, and the settings of all trainings.

A stage is a command of its own, shown as it runs; an interrupted training goes on from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

logger = logging.getLogger("recipes")

CHECKPOINTED_MODEL = "model/huggingface"
"""Where a checkpoint folder holds the model for `from_pretrained`."""
QUICKSTART = Path(__file__).resolve().parent / "arithmetic" / "run.py"
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit status of a command that a signal has ended."""
USAGE = 2  # exit status, as argparse's
INTERRUPTED = "interrupted; the same command goes on from what is there"


@dataclass(slots=True, kw_only=True)
class Options:
    """What the command line asks for."""

    out: Path
    """Folder of all results; one for each seed and warm start."""
    seed: int
    """Of the teacher, the first weights, the order of the data and sampling."""
    num_steps: int
    """Steps of the last training."""
    num_sft_steps: int
    """Steps of the warm start."""
    num_ranks: int
    """Worker processes that share each batch."""
    name: str
    """Folder of the last stage below `out`: another name, another run from the same warm start."""
    overrides: list[str]
    """Settings of the last stage."""


def parser_of(description: str, *, task: str, name: str, steps: int, sft_steps: int, num_ranks: int) -> argparse.ArgumentParser:
    """The command line with its defaults.  task: folder of the results below `outputs`; name, steps: of the last training."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=argparse.SUPPRESS, help=f"folder for everything (default: outputs/{task}/seed<seed>)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of teacher, weights, data order and sampling")
    parser.add_argument("--steps", type=positive, default=steps, help="steps of the last training")
    parser.add_argument("--sft-steps", type=positive, default=sft_steps, help="steps of the warm start")
    parser.add_argument("--ranks", type=positive, default=num_ranks, help="worker processes that train")
    parser.add_argument("--name", default=name, help="name of the last stage's folder; choose another to compare settings")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the last training")
    parser.set_defaults(task=task, out=None)
    return parser


def positive(text: str) -> int:
    """Of a command line: an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> tuple[Options, argparse.Namespace]:
    """What the command line says; what is not ours must look like key=value."""
    found = parser.parse_intermixed_args(arguments)
    if wrong := [text for text in found.overrides if "=" not in text]:
        parser.error(f"not understood: {' '.join(wrong)}; settings are given as key=value")
    options = Options(
        out=Path(os.path.abspath(found.out or Path("outputs") / found.task / f"seed{found.seed}")),
        seed=found.seed,
        num_steps=found.steps,
        num_sft_steps=found.sft_steps,
        num_ranks=found.ranks,
        name=found.name,
        overrides=found.overrides,
    )
    return options, found


def run(options: Options, stages: Callable[[], None]) -> int:
    """Run the stages; returns the exit status of the one that failed, or 0; 130 for a Ctrl-C between two, 2 where nothing can be
    written."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    started = time.monotonic()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.error("--out %s: no folder that can be made (%s); name another", options.out, error.strerror or error)
        return USAGE
    try:
        stages()
    except subprocess.CalledProcessError as error:
        if error.returncode in STOPPED:
            logger.error(INTERRUPTED)
        else:
            logger.error("stopped: the command above ended with status %d", error.returncode)
        return int(error.returncode)
    except KeyboardInterrupt:
        logger.error(INTERRUPTED)
        return STOPPED[0]
    report = options.out / options.name / "report.html"
    logger.info("done in %.0f s; report: %s", time.monotonic() - started, report)
    return 0


def quickstart_with(name: str, settings: Sequence[str]) -> int:
    """The whole of a recipe that is the quickstart with other settings; the user's own come after them."""
    return call_through([sys.executable, str(QUICKSTART), f"--name={name}", *settings, *sys.argv[1:]])


def make_task(options: Options, task: Path) -> None:
    """Data and model, by the two scripts in the folder `task`."""
    make_folder(options, "data", task / "generate.py")
    make_folder(options, "model", task / "build_model.py")


def make_folder(options: Options, name: str, script: Path, *more: str) -> None:
    """Let the script make the folder `name` beside and rename it, so that a half-made one is never taken for done."""
    folder = options.out / name
    if folder.is_dir():
        logger.info("\n%s: done before, %s", name, folder)
        return
    aside = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    call(name, [sys.executable, str(script), "--seed", str(options.seed), "--out", str(aside), *more])
    aside.rename(folder)


def warm_start(options: Options, settings: list[str]) -> Path:
    """The warm start's model folder, trained with these settings of main_sft if it is not there."""
    result = sft_folder(options) / f"global_step_{options.num_sft_steps}" / CHECKPOINTED_MODEL
    if result.is_dir():
        logger.info("\nwarm start: done before, %s", result)
    else:
        train("warm start", "main_sft", settings)
    return result


def sft_folder(options: Options) -> Path:
    """Of the warm start's run."""
    return options.out / "sft"


def train(stage: str, main: str, settings: list[str]) -> None:
    """Run a main of the package; a main knows itself whether its run is finished or to be resumed."""
    call(stage, [sys.executable, "-m", f"rlhub.trainer.{main}", *settings])


def call(stage: str, command: list[str]) -> None:
    """Show and run a command; CalledProcessError if it fails."""
    logger.info("\n%s:\n  %s", stage, shlex.join(command))
    started = time.monotonic()
    if status := call_through(command):
        raise subprocess.CalledProcessError(status, command)
    logger.info("%s: %.0f s", stage, time.monotonic() - started)


def call_through(command: Sequence[str]) -> int:
    """Run a command to its own end; its exit status, 128 + the signal's number if one has killed it.

    A terminal sends Ctrl-C to the command as well, which then saves and ends: it is waited for, where subprocess.run would kill
    it.  SIGTERM, which comes to this process alone, is passed on.
    """
    heard: list[int] = []
    former = {number: signal.signal(number, lambda got, _frame: heard.append(got)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with subprocess.Popen(command, env=environment()) as child:

            def terminate(_number: int, _frame: FrameType | None) -> None:
                child.terminate()

            signal.signal(signal.SIGTERM, terminate)
            if signal.SIGTERM in heard:  # while the command was being started
                child.terminate()
            status = child.wait()
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def environment() -> dict[str, str]:
    """One thread a process: on few cores, processes that each take all of them wait for one another.  A recipe's own modules
    (trainer.plugins=[recipes. ...]) are found from any folder."""
    path = os.pathsep.join([str(QUICKSTART.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ, "PYTHONPATH": path}


def sft_settings(options: Options, project: str, max_length: int) -> list[str]:
    """main_sft on the teacher's demonstrations."""
    return [
        f"data.train_files={options.out / 'data/sft.parquet'}",
        "data.train_batch_size=128",
        f"data.max_length={max_length}",
        f"data.seed={options.seed}",
        f"model.path={options.out / 'model'}",
        "model.enable_gradient_checkpointing=False",
        "optim.lr=4e-3",
        "optim.lr_scheduler_type=cosine",
        "optim.min_lr_ratio=0.1",
        "optim.lr_warmup_steps=20",
        f"trainer.total_training_steps={options.num_sft_steps}",
        f"trainer.save_freq={options.num_sft_steps}",
        *trainer_settings(options, project, sft_folder(options)),
    ]


def trainer_settings(options: Options, project: str, folder: Path) -> list[str]:
    """What all trainings share."""
    return [
        f"trainer.seed={options.seed}",
        f"trainer.n_gpus_per_node={options.num_ranks}",
        f"trainer.project_name={project}",
        f"trainer.experiment_name={folder.name}",
        f"trainer.default_local_dir={folder}",
    ]
