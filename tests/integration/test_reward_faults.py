"""Reward functions of the worst kind behind the real manager: what each costs, and that nothing of them is left."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rlhub.config.sections.reward import CustomRewardConfig, RewardModelConfig
from rlhub.errors import RewardError
from rlhub.rewards import RewardManager, RewardPool, RewardRequest, build_reward_manager
from tests.support.hanging import SAYS_SO, mark, only_hanging_calls_are_late
from tests.unit.rewards.test_managers import Letters, make_batch

SOURCE = """
import ctypes, os, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    kind = solution_str
    if kind == "raise": raise RuntimeError("scorer is broken")
    if kind == "hang":
        SAYS SO
        ctypes.PyDLL(None).sleep(1000)  # holds the interpreter lock
    if kind == "exit": os._exit(0)
    if kind == "segv": ctypes.string_at(0)
    if kind == "hog": return len(bytearray(1 << 40))
    if kind == "print":
        for _ in range(64): print("x" * (1 << 24), flush=True)
    if kind == "fork":
        for _ in range(20):
            if os.fork() == 0:
                os.setsid()
                if os.fork(): os._exit(0)
                os.execvp("sleep", ["sleep", extra_info["mark"]])
        SAYS SO
        time.sleep(1000)
    return {"None": None, "str": "1", "nan": float("nan"), "inf": float("inf"), "bool": True, "list": [1.0], "code": 0.0,
            "lambda": lambda: 1}.get(kind, 1.0)
""".replace("SAYS SO", SAYS_SO)
WIDTH = 8
DEADLINE_S = 2.5
MARK = "98765.43"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "faulty.py"
    path.write_text(textwrap.dedent(SOURCE))
    only_hanging_calls_are_late(monkeypatch, path)
    return path


@pytest.fixture
def build(source: Path) -> Iterator[Callable[..., RewardManager]]:
    built: list[RewardManager] = []

    def make(**settings: object) -> RewardManager:
        config = RewardModelConfig(**{"timeout_s": 10.0, "num_workers": 2, "max_error_rate": 1.0, "memory_gb": 2.0} | settings)  # type: ignore[arg-type]
        built.append(build_reward_manager(config, CustomRewardConfig(path=str(source)), Letters(), WIDTH))
        return built[-1]

    yield make
    for manager in built:
        manager.close()


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("raise", "raised"),
        ("exit", "died"),
        ("segv", "died"),
        ("hog", "memory"),
        ("None", "bad_value"),
        ("str", "bad_value"),
        ("nan", "bad_value"),
        ("inf", "bad_value"),
        ("list", "bad_value"),
        ("lambda", "bad_value"),
    ],
)
def test_a_fault_masks_its_own_sample_only(build: Callable[..., RewardManager], fault: str, kind: str) -> None:
    result = build()(make_batch(["ok", fault, "ok", "", "bool"]))
    assert result.valid.tolist() == [True, False, True, True, True]
    assert result.scores.tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]
    assert result.metrics["reward/num_failed"] == result.metrics[f"reward/num_failed/{kind}"] == 1.0


def test_hanging_samples_cost_one_deadline_each_shared_by_the_workers(build: Callable[..., RewardManager], source: Path) -> None:
    manager = build(timeout_s=DEADLINE_S)
    result = manager(make_batch(["hang", "ok", "hang", "ok", "hang", "ok", "hang"]))
    assert result.valid.tolist() == [False, True, False, True, False, True, False]
    assert result.metrics["reward/num_failed/timeout"] == 4.0
    assert len(hung(source)) == 4, "each was begun once"


def hung(source: Path) -> list[Path]:
    """What each process that hung in a call has left."""
    return list(source.parent.glob(f"{source.name}.*.hangs"))


def test_a_function_that_always_hangs_stops_the_run_after_a_few_deadlines(
    build: Callable[..., RewardManager], source: Path
) -> None:
    """Two of 200 samples may fail; two workers hang at a time."""
    with pytest.raises(RewardError, match=r"(?s)timeout.*more than reward_model.max_error_rate=0.01.* were not scored"):
        build(timeout_s=DEADLINE_S, max_error_rate=0.01)(make_batch(["hang"] * 200))
    assert 3 <= len(hung(source)) <= 5


def test_a_gigabyte_of_output_is_not_a_fault(build: Callable[..., RewardManager]) -> None:
    assert build(timeout_s=60.0)(make_batch(["print"])).scores.tolist() == [1.0]


def test_processes_that_a_function_leaves_behind_are_killed(build: Callable[..., RewardManager]) -> None:
    batch = make_batch(["fork"])
    batch.non_tensor_batch["extra_info"][0] = {"mark": MARK}
    before = descendants()
    assert build(timeout_s=DEADLINE_S)(batch).metrics["reward/num_failed/timeout"] == 1.0
    deadline = time.monotonic() + 60  # what was killed ends when it gets a core
    while [p for p in psutil.process_iter(["cmdline"]) if MARK in (p.info["cmdline"] or [])] or len(descendants() - before) > 1:
        assert time.monotonic() < deadline, "something is still there"
        time.sleep(0.05)


def descendants() -> set[psutil.Process]:
    """Of this process, without those of clusters of other tests, which come and go."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            if child.name() not in ("raylet", "gcs_server"):
                found.update((child, *child.children(recursive=True)))
    return found


def test_the_run_stops_where_the_policy_says_so_and_no_child_is_left_waiting(build: Callable[..., RewardManager]) -> None:
    with pytest.raises(RewardError, match=r"(?s)RuntimeError: scorer is broken.*on_error=fail"):
        build(on_error="fail")(make_batch(["ok", "raise"]))
    manager = build(max_error_rate=0.1)
    with pytest.raises(RewardError, match="50% is more than reward_model.max_error_rate=0.1"):
        manager(make_batch(["ok", "raise"]))
    assert manager(make_batch(["ok", "ok"])).metrics["reward/num_failed"] == 0.0


def test_an_answer_that_is_code_is_text() -> None:
    """The built-in scorers, in their child, on text that would leave a file behind if it were run."""
    mark = Path("/tmp") / f"rlhub-evaluated-{os.getpid()}"
    pool = RewardPool("rlhub.rewards.registry:compute_score", num_workers=1)
    payload = f"__import__('os').system('touch {mark}')"
    texts = [payload, f"#### {payload}", f"\\boxed{{{payload}}}", f"The answer is {payload}"]
    requests = [
        RewardRequest(data_source=s, solution_str=t, ground_truth="5")
        for s in ("gsm8k", "lighteval/MATH", "exact")
        for t in texts
    ]
    outcomes = pool.score(requests)
    pool.close()
    assert [outcome.score for outcome in outcomes] == [0.0] * 12 and not any(outcome.error for outcome in outcomes)
    assert not mark.exists()


@pytest.mark.parametrize("state", ["idle", "hang"])
def test_children_of_a_killed_driver_end_by_themselves(tmp_path: Path, state: str) -> None:
    """kill -9 of the driver while its child waits for work, and while it hangs holding the interpreter lock."""
    (tmp_path / "faulty.py").write_text(textwrap.dedent(SOURCE))
    program = f"""
        from rlhub.rewards import RewardPool, RewardRequest
        from rlhub.utils.children.pool import KillablePool
        KillablePool._deadline = lambda pool, child: child.since + 1e6  # it ends no child before its own end
        pool = RewardPool({str(tmp_path / "faulty.py")!r} + ":compute_score", num_workers=1, timeout_s=1.5)
        pool.start()
        print("up", flush=True)
        if {state == "hang"}:
            pool.score([RewardRequest(data_source="s", solution_str="hang", ground_truth="")])
        import time
        time.sleep(1000)
    """
    driver = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE)
    assert driver.stdout is not None and driver.stdout.readline() == b"up\n"
    deadline = time.monotonic() + 60
    while state == "hang" and not list(tmp_path.glob("faulty.py.*.hangs")):
        assert time.monotonic() < deadline, "it does not hang"
        time.sleep(0.01)
    children = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert len(children) in (2, 3)  # with its supervisor and, in a namespace, that one's first process
    assert not psutil.wait_procs(children, timeout=60)[1]


def test_a_stopped_child_is_replaced(build: Callable[..., RewardManager], source: Path) -> None:
    others = set(psutil.Process().children())  # of other tests' clusters, say
    manager = build(timeout_s=DEADLINE_S, num_workers=1)
    manager(make_batch(["ok"]))
    (supervisor,) = set(psutil.Process().children()) - others
    child = supervisor.children(recursive=True)[-1]
    child.suspend()
    mark(source, child.pid).touch()
    result = manager(make_batch(["ok", "ok"]))
    assert result.metrics["reward/num_failed/timeout"] == 1.0 and result.scores.tolist() == [0.0, 1.0]
