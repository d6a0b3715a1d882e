"""Whole training runs, recorded at one commit and compared bit for bit at another: the proof that a change changes no number.

    python scripts/golden_runs.py record --out FOLDER               # at the commit to compare with
    python scripts/golden_runs.py compare --with FOLDER             # after the change; exit status 1 where anything differs

Each configuration is a tiny `main_ppo` job of three steps with two optimizer steps each, on CPU with the hf engine, in process
(backend local) and through Ray.  Recorded are every tensor of its last checkpoint (weights and optimizer states of actor and
critic) and every metric of every step but times, memory and throughput.  Model, data and reward are made by `record` and stay
in FOLDER, so both sides train on the same files; so are the batches that `replayed` trains on, which a stale run has left.

The script knows the product only by its command line and its run folder, and takes it from the working directory: copied to
another place, it compares a checkout of any age.  Records are not committed: they hold for one machine and one set of
libraries.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import hashlib
import importlib
import json
import math
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # so that sums have one order

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

MAIN = "rlhub.trainer.main_ppo"
LIBRARIES = ("hydra", "pyarrow.parquet", "tensordict", "torch.distributed.fsdp", "transformers.models.qwen2.modeling_qwen2")
"""What most of a run's seconds would go to; loaded once for all."""
STEPS, PROMPTS, SAMPLES, ROWS, VOCABULARY = 3, 8, 4, 24, 16
VARYING = (
    *(
        "timing_s/*",
        "timing_per_token_ms/*",
        "perf/*",
        "memory/*",
        "rollout/*_s",
        "rollout/*_s_max",
        "rollout/*_share",
        "trainer/idle_share",
    ),
    *("rollout/capacity", "rollout/ready_groups", "rollout/running_groups", "rollout/requests*", "rollout/tokens"),
)
"""Metrics that two runs of one commit do not share: durations, and what the rollout service was doing when it was asked."""
VARYING_OF = {"async_staleness_0": ("mismatch/*",)}
"""The same of one configuration: which requests the rollout service computes together depends on when they arrive, and with that
the last bits of the rollout's log-probs.  What is sampled and trained does not."""
TIMEOUT_S = 540.0
"""Longest time of one run, far above the five to twenty seconds that it takes."""
SHOWN = 6
"""Metrics and tensors that are listed for one run; the rest is counted."""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    words = solution_str.split()
    even = [word[-1:] in "02468" for word in words]
    return {"score": sum(even) / max(len(words), 1), "acc": bool(even) and even[0]}
"""
"""A reward that differs between most samples, and `acc`, in which all samples of a group agree now and then."""
CLUSTER = """
import ray, sys
context = ray.init(num_cpus=8, object_store_memory=100_000_000, include_dashboard=False, _node_ip_address="127.0.0.1")
print("address", context.address_info["address"], flush=True)
sys.stdin.read()
"""
"""A program that keeps a Ray cluster until its standard input ends."""

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
PPO = (
    "algorithm.adv_estimator=gae",
    "algorithm.gamma=0.99",
    "algorithm.lam=0.95",
    "critic.optim.lr=1e-2",
    "critic.cliprange_value=0.05",
)
STALE = (f"{ROLLOUT}.mode=async", "trainer.max_staleness=1", "trainer.stale_policy=correct", f"{CORRECTION}.rollout_is=token")
ACTIONS = (
    "{chunk:2,action_dim:2,bins:5,first_bin_id:11,place_ids:[7,8,9,10],image_token_id:3,tokens_per_image:4,value_head:true,"
    "action_low:[-1.0],action_high:[1.0]}"
)
"""Of the policy of actions that `write_inputs` writes."""
INEXACT = f"{ROLLOUT}.dtype=bfloat16"
"""The engine then samples from a policy that differs from the trainer's, so that a correction corrects."""
CONFIGURATIONS: Mapping[str, Sequence[str]] = {
    "grpo": (),
    "gae": (*PPO, f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.shuffle=True"),
    "kl_in_reward": (
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.gamma=0.99",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.1",
    ),
    "kl_loss": (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.entropy_coeff=0.01"),
    "dapo_filter": (
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        f"{ACTOR}.clip_ratio_high=0.28",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
    ),
    "remax": ("algorithm.adv_estimator=remax",),
    "tis": (f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_rs=[seq_mean_k3]", INEXACT)
    + (f"{CORRECTION}.rollout_rs_threshold=['0.000001']",),
    "bypass": (f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.rollout_is=sequence", INEXACT),
    "mask_truncated": (f"{ACTOR}.mask_truncated=True", "algorithm.adv_estimator=rloo"),
    "whiten_rewards": (*PPO, "algorithm.whiten_rewards=True"),
    "async_staleness_0": (f"{ROLLOUT}.mode=async", "trainer.max_staleness=0"),
    "replayed": (*STALE, "trainer.replay_from=INPUTS/batches"),
    "collected": (*STALE, f"{ROLLOUT}.trajectories_folder=INPUTS/trajectories", f"{ROLLOUT}.weights_folder=RUN/weights"),
    "episodes": (
        "env.name=reach_color",
        "data.train_files=null",
        "custom_reward_function.path=null",
        "data.max_prompt_length=16",
        "actor_rollout_ref.model.path=INPUTS/policy",
        f"actor_rollout_ref.model.vla={ACTIONS}",
        "algorithm.adv_estimator=chunk_gae",
        f"{ACTOR}.log_prob_level=chunk",
        f"{ACTOR}.value_loss_coef=0.5",
        f"{ACTOR}.optim.lr=1e-3",
        f"{ROLLOUT}.n=2",
    ),
    "separate_pools": (
        *PPO,
        "trainer.pools.generation.n_gpus_per_node=1",
        "trainer.placement.rollout=generation",
        "trainer.pools.values.n_gpus_per_node=1",
        "trainer.placement.critic=values",
    ),
}
"""Name -> settings beside the common ones; INPUTS and RUN stand for folders."""
ONLY_RAY = ("separate_pools",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """metrics: one mapping a step.  tensors: those of the last checkpoint, by file and name."""

    metrics: list[dict[str, Any]]
    tensors: dict[str, Tensor]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        digests = {name: digest(tensor) for name, tensor in sorted(self.tensors.items())}
        (folder / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.metrics))
        save_file(self.tensors, folder / "tensors.safetensors")

    @classmethod
    def load(cls, folder: Path) -> Outcome:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return cls(metrics=rows, tensors=tensors_in(folder / "tensors.safetensors"))

    @classmethod
    def of_run(cls, folder: Path) -> Outcome:
        """Reads the metrics and the last checkpoint of a run folder."""
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        last, tensors = folder / f"global_step_{STEPS}", dict[str, Any]()
        for path in sorted(last.rglob("*.safetensors")):
            tensors |= {f"{path.relative_to(last)}:{name}": tensor for name, tensor in tensors_in(path).items()}
        if len(rows) != STEPS or not tensors:
            raise RuntimeError(f"{folder} has {len(rows)} of {STEPS} steps and {len(tensors)} tensors of a last checkpoint")
        return cls(metrics=rows, tensors=tensors)


def tensors_in(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def digest(tensor: Tensor) -> str:
    """SHA-256 of dtype, shape and bytes."""
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.sha256(head + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def differences(recorded: Outcome, present: Outcome, ignored: Sequence[str] = ()) -> list[str]:
    """One line for each metric or tensor that is not the same in every bit, the tensors last; [] where nothing differs."""
    lines, names = [], sorted({name for row in (*recorded.metrics, *present.metrics) for name in row})
    if len(recorded.metrics) != len(present.metrics):
        lines.append(f"{len(recorded.metrics)} steps recorded, {len(present.metrics)} now")
    for name in names:
        if any(fnmatch(name, pattern) for pattern in (*VARYING, *ignored)):
            continue
        rows = zip(recorded.metrics, present.metrics, strict=False)
        found = [(index, row.get(name), now.get(name)) for index, (row, now) in enumerate(rows, 1)]
        different = [(step, before, now) for step, before, now in found if repr(before) != repr(now)]
        if different:
            step, before, now = different[0]
            lines.append(f"metric {name}: {before} recorded, {now} now{distance(before, now)}, first in step {step}")
    for name in sorted(recorded.tensors.keys() ^ present.tensors.keys()):
        lines.append(f"tensor {name}: only {'recorded' if name in recorded.tensors else 'in the present run'}")
    for name in sorted(recorded.tensors.keys() & present.tensors.keys()):
        before, now = recorded.tensors[name], present.tensors[name]
        if digest(before) != digest(now):
            lines.append(f"tensor {name}: {tensor_distance(before, now)}")
    return lines


def distance(before: Any, now: Any) -> str:
    numbers = isinstance(before, int | float) and isinstance(now, int | float)
    return f" (by {abs(now - before):.3g})" if numbers and math.isfinite(now - before) else ""


def tensor_distance(before: Tensor, now: Tensor) -> str:
    if (before.dtype, before.shape) != (now.dtype, now.shape):
        return f"{before.dtype} {tuple(before.shape)} recorded, {now.dtype} {tuple(now.shape)} now"
    gaps = (before.double() - now.double()).abs()
    return f"{int((before != now).sum())} of {before.numel()} elements differ, by {float(gaps.max()):.3g} at most"


def write_inputs(folder: Path, product: Path) -> None:
    """Writes what runs share: the model, the prompts, the reward, and what a collecting job would have left."""
    sys.path.insert(0, str(product))
    import pyarrow as pa
    import pyarrow.parquet as pq

    from recipes.tiny_smolvlm import write_model
    from scripts.bench.tiny_model import build

    write_model(folder / "policy", 1, ["touch", "red", "blue"], num_places=4, num_bins=5)
    build(folder / "model", hidden=32, layers=2, vocab_size=VOCABULARY)
    words = [
        [f"w{2 + (7 * row + 5 * word + row * word) % (VOCABULARY - 2)}" for word in range(2 + row % 3)] for row in range(ROWS)
    ]
    rows = [
        {
            "prompt": " ".join(prompt),
            "data_source": "words",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": row},
        }
        for row, prompt in enumerate(words)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)
    write_trajectories(folder / "trajectories")


def write_trajectories(folder: Path) -> None:
    """Writes what a collecting job would have left, samples up to a version old, a group a file."""
    from rlhub.agents.trajectory import Trajectory
    from rlhub.rollout_service.executor.episode_groups import Group, PromptItem
    from rlhub.rollout_service.trajectory_files import TrajectoryWriter

    writer, row = TrajectoryWriter(str(folder)), {"data_source": "words", "ground_truth": "", "extra_info": {}}
    for number in range(STEPS * PROMPTS):
        samples = [Trajectory(**sample_of(SAMPLES * number + one)) for one in range(SAMPLES)]
        writer.write([Group(item=PromptItem(prompt_ids=(2, 3), ordinal=number, row=row), trajectories=samples)])


def sample_of(number: int) -> dict[str, Any]:
    length = 1 + number % 8
    return {
        "prompt_ids": [2, 3],
        "response_ids": [2 + (5 * number + token * token) % (VOCABULARY - 2) for token in range(length)],
        "response_mask": [1] * length,
        "rollout_log_probs": [-2.5 - (number + token) % 7 / 10 for token in range(length)],
        "versions": [max(0, number // (SAMPLES * PROMPTS) - number % 2)] * length,
    }


def settings(name: str, inputs: Path, run_folder: Path, more: Sequence[str]) -> list[str]:
    """The command line of one configuration; later settings win."""
    own = [text.replace("INPUTS", str(inputs)).replace("RUN", str(run_folder)) for text in CONFIGURATIONS[name]]
    return [
        f"data.train_files={inputs / 'train.parquet'}",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={inputs / 'model'}",
        f"{ACTOR}.ppo_mini_batch_size={PROMPTS // 2}",
        f"{ACTOR}.optim.lr=1e-2",
        f"{ACTOR}.clip_ratio=0.1",
        f"{ROLLOUT}.n={SAMPLES}",
        f"{ROLLOUT}.name=hf",
        "algorithm.adv_estimator=grpo",
        f"custom_reward_function.path={inputs / 'reward.py'}",
        "reward_model.num_workers=1",
        "trainer.device=cpu",
        "trainer.total_epochs=100",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.default_local_dir={run_folder}",
        *own,
        *more,
    ]


def train(name: str, backend: str, inputs: Path, product: Path, more: Sequence[str], batches: Path | None = None) -> Outcome:
    """Runs one configuration in a process of its own and returns what it left.  RuntimeError with its output where it fails.

    batches: the folder to which the batches that it has recorded are copied.
    """
    scratch = Path(tempfile.mkdtemp(prefix="golden-run-"))  # a TemporaryDirectory would end with the child
    try:
        where = "trainer.controller=multi" if backend == "torchrun" else f"trainer.backend={backend}"
        arguments = settings(name, inputs.resolve(), scratch / "run", [where, *more])
        start = all_ranks if backend == "torchrun" else main_ppo
        status = forked(lambda: start(arguments, product, scratch), scratch / "log")
        if status != 0:
            output = (scratch / "log").read_text(errors="replace")
            raise RuntimeError(f"{name} ({backend}) ended with status {status}:\n{output[-3000:]}")
        if batches is not None:
            shutil.copytree(scratch / "run" / "batches", batches)
        return Outcome.of_run(scratch / "run")
    finally:
        shutil.rmtree(scratch)


def main_ppo(arguments: Sequence[str], product: Path, folder: Path) -> None:
    """Does in this process what `python -m rlhub.trainer.main_ppo` does in a new one."""
    os.chdir(folder)
    os.environ.update(environment(product))
    sys.path.insert(0, str(product))
    sys.argv = [MAIN, *arguments]
    runpy.run_module(MAIN, run_name="__main__", alter_sys=True)


def ranks_in(arguments: Sequence[str]) -> int:
    """The ranks of the main pool that a command line asks for."""
    key = "trainer.n_gpus_per_node="
    return int(next((text.removeprefix(key) for text in reversed(arguments) if text.startswith(key)), "1"))


def all_ranks(arguments: Sequence[str], product: Path, folder: Path) -> None:
    """Does in processes that have the libraries loaded what torchrun does in new ones: starts a program on every rank, and ends
    the others where one fails."""
    pools = sum(int(text.rpartition("=")[2]) for text in arguments if text.startswith("trainer.pools."))
    size = ranks_in(arguments) + pools
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            values = (str(rank), str(size), str(rank), str(size), "127.0.0.1", port)
            os.environ.update(dict(zip(names, values, strict=True)))
            os._exit(status_of(lambda: main_ppo(arguments, product, folder)))
        children.append(child)
    statuses = []
    while children:
        done, status = os.wait()
        if done in children:
            children.remove(done)
            statuses.append(os.waitstatus_to_exitcode(status))
    raise SystemExit(max(statuses, key=abs))


def forked(function: Callable[[], object], log: Path) -> int:
    """Calls the function in a child that has the libraries loaded, and returns its exit status, negative for a signal."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(target, stream)
        os._exit(status_of(function))  # the parent's own frames, below, are not the child's to leave
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise RuntimeError(f"no end after {TIMEOUT_S:g} s:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.02)


def status_of(function: Callable[[], object]) -> int:
    """Calls the function as the interpreter would call a whole program."""
    status = 0
    try:
        function()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - this is where the process ends
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def environment(product: Path) -> dict[str, str]:
    """Lets the product's code be imported by every process of a run, and no network be asked."""
    paths = os.pathsep.join(filter(None, (str(product), os.environ.get("PYTHONPATH"))))
    fixed = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "RAY_USAGE_STATS_ENABLED": "0"}
    return {**os.environ, **fixed, "PYTHONPATH": paths}


@contextlib.contextmanager
def cluster(product: Path, needed: bool) -> Iterator[list[str]]:
    """Yields the settings with which the runs join one Ray cluster, which ends with the block; none where none is needed."""
    if not needed:
        yield []
        return
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env=environment(product) | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        lines = iter(process.stdout.readline, "")
        address = next((line.split()[1] for line in lines if line.startswith("address ")), None)
        if address is None:
            raise RuntimeError("Ray did not start; is the machine very busy, or short of memory?")
        yield [f"trainer.ray_init.address='{address}'"]
    finally:
        process.stdin.close()
        process.wait(240)


def runs_of(only: Sequence[str], backend: str) -> list[tuple[str, str]]:
    """(configuration, backend) of every run that is asked for."""
    backends = ("local", "ray") if backend == "both" else (backend,)
    return [
        (name, kind)
        for name in CONFIGURATIONS
        if not only or name in only
        for kind in backends
        if kind != "local" or name not in ONLY_RAY
    ]


def commit_of(product: Path) -> str:
    command = ["git", "-C", str(product), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def conditions(product: Path) -> dict[str, str]:
    """What else than the product's code decides about bits."""
    return {"commit": commit_of(product), "torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}


def record(arguments: argparse.Namespace, runs: Sequence[tuple[str, str]]) -> int:
    inputs = arguments.out / "inputs"
    if not inputs.exists():
        inputs.mkdir(parents=True)
        if status := forked(lambda: write_inputs(inputs, arguments.product), inputs / "log"):
            raise RuntimeError(f"the inputs could not be made (status {status}): see {inputs / 'log'}")
    if any(name == "replayed" for name, _ in runs) and not (inputs / "batches").exists():
        recording = ("trainer.replay_from=null", "trainer.record_batches=True")
        train("replayed", "local", inputs, arguments.product, recording, inputs / "batches")
    (arguments.out / "conditions.json").write_text(json.dumps(conditions(arguments.product), indent=1) + "\n")
    with cluster(arguments.product, any(backend == "ray" for _, backend in runs)) as joined:
        for name, backend in runs:
            started = time.monotonic()
            outcome = train(name, backend, inputs, arguments.product, [*(joined if backend == "ray" else ()), *arguments.set])
            outcome.save(arguments.out / name / backend)
            print(f"{name} ({backend}): {len(outcome.tensors)} tensors recorded, {time.monotonic() - started:.0f} s", flush=True)
    return 0


def compare(arguments: argparse.Namespace, runs: Sequence[tuple[str, str]]) -> int:
    before, now = json.loads((arguments.record / "conditions.json").read_text()), conditions(arguments.product)
    if (before["torch"], before["cpu"]) != (now["torch"], now["cpu"]):
        print(f"recorded with {before}, now {now}: bits may differ for that reason alone", flush=True)
    failed = 0
    with cluster(arguments.product, any(backend == "ray" for _, backend in runs)) as joined:
        for name, backend in runs:
            lines = compare_one(arguments, name, backend, [*(joined if backend == "ray" else ()), *arguments.set])
            failed += bool(lines)
    print(f"{len(runs) - failed} of {len(runs)} runs are as recorded at {before['commit']}")
    return 1 if failed else 0


def compare_one(arguments: argparse.Namespace, name: str, backend: str, more: Sequence[str]) -> list[str]:
    """Runs one configuration again and prints how it compares."""
    folder, started = arguments.record / name / (arguments.against or backend), time.monotonic()
    try:
        recorded = Outcome.load(folder)
        present = train(name, backend, arguments.record / "inputs", arguments.product, more)
        lines = differences(recorded, present, (*VARYING_OF.get(name, ()), *arguments.ignore))
    except FileNotFoundError as error:
        lines = [f"no record: {error}"]
    except RuntimeError as error:
        lines = [str(error)]
    print(f"{name} ({backend}): {'DIFFERENT' if lines else 'the same'}, {time.monotonic() - started:.0f} s", flush=True)
    for line in lines if arguments.all else lines[:SHOWN]:
        print(f"    {line}", flush=True)
    if len(lines) > SHOWN and not arguments.all:
        print(f"    and {len(lines) - SHOWN} more (--all shows them)", flush=True)
    return lines


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--only", default="", metavar="NAME,...", help=f"of {', '.join(CONFIGURATIONS)}")
    common.add_argument("--backend", choices=("local", "ray", "torchrun", "both"), default="both")
    common.add_argument(
        "--product", type=Path, default=Path.cwd(), help="checkout whose rlhub runs (default: the working directory)"
    )
    common.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of every run")
    recording = commands.add_parser("record", parents=[common], help="write the record of the present commit")
    recording.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    comparing = commands.add_parser("compare", parents=[common], help="run again and compare with a record")
    comparing.add_argument("--with", type=Path, required=True, metavar="FOLDER", dest="record")
    comparing.add_argument(
        "--against", choices=("local", "ray"), help="backend whose record is compared (default: the run's own)"
    )
    comparing.add_argument(
        "--ignore", nargs="+", default=[], metavar="METRIC", help="metrics to leave out, as patterns: 'async/*'"
    )
    comparing.add_argument("--all", action="store_true", help=f"list every difference, not the first {SHOWN} of a run")
    arguments = parser.parse_args(given)
    arguments.only = [name for name in arguments.only.split(",") if name]
    if unknown := sorted(set(arguments.only) - set(CONFIGURATIONS)):
        parser.error(f"no configuration {', '.join(unknown)}; known: {', '.join(CONFIGURATIONS)}")
    arguments.product = arguments.product.resolve()
    return arguments


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    runs = runs_of(arguments.only, arguments.backend)
    for name in LIBRARIES:
        importlib.import_module(name)
    return record(arguments, runs) if arguments.command == "record" else compare(arguments, runs)


if __name__ == "__main__":
    sys.exit(main())
