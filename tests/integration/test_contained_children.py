"""What runs in children can neither forge an answer nor outlive its pool, and reads no secret that it was not given."""

from __future__ import annotations

import asyncio
import json
import os
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhub.config.sections.reward import CustomRewardConfig, RewardModelConfig
from rlhub.envs.base import EnvironmentLimits
from rlhub.envs.source import EnvironmentPool
from rlhub.errors import ConfigError, LoadError
from rlhub.rewards import RewardPool, RewardRequest, build_reward_manager
from rlhub.rewards.pool import RewardOutcome
from rlhub.utils.children import process
from rlhub.utils.children.process import namespaces_allowed
from tests.integration.test_tool_processes import programs
from tests.unit.rewards.test_managers import Letters

CONTAINED = pytest.mark.parametrize("contained", ["namespace", "subreaper"], indirect=True)
"""By what this machine allows, and by what all machines do."""


@pytest.fixture
def contained(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    in_namespace = request.param == "namespace"
    if in_namespace and not namespaces_allowed():
        pytest.skip("PID namespaces are not allowed here")
    monkeypatch.setattr(process, "namespaces_allowed", lambda: in_namespace)


SCORER = """
import json, os, signal, sys, time

def chain(file):
    # Each process lives for a moment: it starts the next one, in a session of its own, and ends.
    if os.fork() == 0:
        while True:
            if os.fork():
                os._exit(0)
            os.setsid()
            with open(file, "a") as beat:  # what only grows can be read at any moment
                beat.write(".")

FORGED = [
    {"value": 99.0},
    {"id": 0, "value": 99.0},
    {"ready": True},
]

def forge():
    for number in range(3, 256):
        for line in FORGED:
            try:
                os.write(number, json.dumps(line).encode() + b"\\n")
            except OSError:
                pass

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "pid":
        return {"score": 0.0, "pid": os.getpid()}
    if solution_str == "chain":
        chain(ground_truth)
        while not os.path.exists(ground_truth):
            time.sleep(0.01)
    if solution_str == "killed chain":
        chain(ground_truth)
        while not os.path.exists(ground_truth):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "forge in a fork":
        if os.fork() == 0:
            forge()
            os._exit(0)
        os.wait()
    if solution_str == "forge":
        forge()
    if solution_str == "return twice":
        child = os.fork()
        if child == 0:
            return 50.0
        os.waitpid(child, 0)
    if solution_str == "variables":
        return {"score": 1.0, "names": sorted(os.environ)}
    if solution_str == "secret":
        return float(os.environ[ground_truth])
    return float(ground_truth)
"""


@pytest.fixture
def scorer(tmp_path: Path) -> str:
    (tmp_path / "scorer.py").write_text(textwrap.dedent(SCORER))
    return f"{tmp_path / 'scorer.py'}:compute_score"


@pytest.fixture
def pool(scorer: str) -> Iterator[RewardPool]:
    made = RewardPool(scorer, num_workers=1, timeout_s=60.0)
    yield made
    made.close()


def score(pool: RewardPool, *rows: tuple[str, Any]) -> list[RewardOutcome]:
    return pool.score([RewardRequest(data_source="s", solution_str=what, ground_truth=truth) for what, truth in rows])


def grows(beat: Path, within_s: float) -> bool:
    """Whether somebody still writes to the file."""
    before, deadline = beat.stat().st_size, time.monotonic() + within_s
    while time.monotonic() < deadline:
        if beat.stat().st_size > before:
            return True
        time.sleep(0.01)
    return False


def check_ended(beat: Path) -> None:
    """Nobody writes to the file any more: what was killed ends when it gets a core."""
    deadline = time.monotonic() + 20
    while grows(beat, within_s=0.5):
        assert time.monotonic() < deadline, "the chain of forks goes on"


@CONTAINED
@pytest.mark.usefixtures("contained")
def test_a_chain_of_forks_ends_with_its_pool(pool: RewardPool, tmp_path: Path) -> None:
    beat = tmp_path / "beat"
    assert score(pool, ("chain", str(beat)))[0].error is not None  # the text is no number
    assert grows(beat, within_s=20), "it was to be alive until the pool is closed"
    pool.close()
    check_ended(beat)


@CONTAINED
@pytest.mark.usefixtures("contained")
def test_a_chain_of_forks_ends_with_the_process_that_started_it(pool: RewardPool, tmp_path: Path) -> None:
    (outcome,) = score(pool, ("killed chain", str(tmp_path / "beat")))
    assert outcome.error is not None and outcome.error.kind == "died" and "SIGKILL" in outcome.error.message
    check_ended(tmp_path / "beat")


@CONTAINED
@pytest.mark.usefixtures("contained")
def test_no_fork_of_a_scorer_can_answer_for_it(pool: RewardPool) -> None:
    rows = [("", 1), ("forge in a fork", 2), ("", 3), ("return twice", 4), ("", 5), ("pid", 0)]
    outcomes = score(pool, *rows, ("pid", 0))
    assert [outcome.score for outcome in outcomes[:5]] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert outcomes[-1].details == outcomes[-2].details


def test_an_answer_that_nobody_asked_for_costs_its_own_call_only(pool: RewardPool) -> None:
    outcomes = score(pool, ("", 1), ("forge", 2), ("", 3))
    assert [outcome.error.kind if outcome.error else outcome.score for outcome in outcomes] == [1.0, "died", 3.0]
    assert outcomes[1].error is not None and "not the one to this call" in outcomes[1].error.message


FORGE = """
import json, os, time
forged = json.dumps({"value": {"text": "forged", "failed": False}}).encode() + b"\\n"
for number in range(3, 1024):
    try:
        os.write(number, forged)
    except OSError:
        pass
for number in range(3, 1024):
    try:
        os.write(os.open("/proc/%d/fd/%d" % (os.getppid(), number), os.O_WRONLY), forged)
    except OSError:
        pass
time.sleep(0.3)  # the forged answer is read alone, and the own one would be the next call's
print("own")
"""


@CONTAINED
@pytest.mark.usefixtures("contained")
def test_what_a_program_writes_to_its_descriptors_reaches_no_other_call() -> None:
    forging, *others = programs(FORGE, "print(2)", "print(3)", num_workers=1)
    assert [result.text for result in others] == ["2\n", "3\n"]
    assert forging.text != "forged"


@CONTAINED
@pytest.mark.usefixtures("contained")
def test_a_program_reads_no_descriptor_of_the_process_that_runs_it() -> None:
    look = """
        import os
        print(sorted(os.listdir("/proc/self/fd"))[:4] if os.access("/proc/self/fd", os.R_OK) else "hidden")
        try:
            print(os.listdir("/proc/%d/fd" % os.getppid()), open("/proc/%d/environ" % os.getppid(), "rb").read())
        except OSError as error:
            print(type(error).__name__)
    """
    own, others = programs(textwrap.dedent(look))[0].text.splitlines()
    assert others in ("PermissionError", "FileNotFoundError")
    assert len(json.loads(own.replace("'", '"'))) <= 5 if own.startswith("[") else own == "hidden"


@CONTAINED
@pytest.mark.usefixtures("contained")
def test_a_program_ends_with_its_call() -> None:
    """Also what it has started, while other calls go on."""
    leave = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n    time.sleep(600)\nprint('ok')"
    )
    left, others = programs(leave, "import os; print(len(os.listdir('/proc/self/task')))", num_workers=1)
    assert left.text == "ok\n" and others.text == "1\n"


def test_the_start_says_where_forks_are_not_contained(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Once, and why."""
    monkeypatch.setattr(process, "PROBE", "raise PermissionError('unshare')")
    namespaces_allowed.cache_clear()
    try:
        assert not namespaces_allowed() and not namespaces_allowed()
    finally:
        namespaces_allowed.cache_clear()
    (said,) = caplog.records
    assert "not contained" in said.getMessage() and "PermissionError: unshare" in said.getMessage()


def test_a_child_is_known_by_its_number_inside_too(pool: RewardPool) -> None:
    (outcome,) = score(pool, ("pid", 0))
    assert "scorer.py" in " ".join(psutil.Process(outcome.details["pid"]).cmdline())
    assert psutil.Process(outcome.details["pid"]) in psutil.Process().children(recursive=True)


SECRETS = {"WANDB_API_KEY": "w", "HF_TOKEN": "h", "MY_PAT": "p", "PGPASSWORD": "g", "PLAIN_SETTING": "7", "A_SECRET": "12"}


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("secrets")
def test_a_program_reads_no_variable_that_was_not_named_for_it() -> None:
    code = "import os\nprint(*sorted(os.environ))\nprint(open('/proc/self/environ').read().count('WANDB'))"
    allowed = {"PATH", "HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}
    bare = programs(code)[0].text.splitlines()
    assert set(bare[0].split()) <= allowed and "PATH" in bare[0] and bare[1:] == ["0"]
    named = programs(code, env=["HF_TOKEN"])[0].text.splitlines()
    assert set(named[0].split()) - allowed == {"HF_TOKEN"}


def test_a_variable_that_is_named_and_not_set_is_an_error(scorer: str) -> None:
    with pytest.raises(ConfigError, match="NO_SUCH_VARIABLE"):
        programs("1", env=["NO_SUCH_VARIABLE"])
    with pytest.raises(ConfigError, match=r"custom_reward_function.env.*NO_SUCH_VARIABLE"):
        RewardPool(scorer, env=["NO_SUCH_VARIABLE"]).start()
    custom = CustomRewardConfig(path=scorer.rpartition(":")[0], env=["NO_SUCH_VARIABLE"])
    with pytest.raises(ConfigError, match=r"^custom_reward_function.env lists NO_SUCH_VARIABLE: not set"):
        build_reward_manager(RewardModelConfig(), custom, Letters(), 8)


@pytest.mark.usefixtures("secrets")
def test_a_scorer_keeps_its_variables_but_for_secrets_and_the_error_names_the_setting(pool: RewardPool, scorer: str) -> None:
    seen, missing, plain = score(pool, ("variables", 0), ("secret", "A_SECRET"), ("secret", "PLAIN_SETTING"))
    assert not set(seen.details["names"]) & (SECRETS.keys() - {"PLAIN_SETTING"}) and plain.score == 7.0
    assert {"PATH", "PLAIN_SETTING"} <= set(seen.details["names"])
    assert missing.error is not None and "KeyError: 'A_SECRET'" in missing.error.message
    assert "custom_reward_function.env" in missing.error.message
    given = RewardPool(scorer, num_workers=1, env=["A_SECRET"])
    assert score(given, ("secret", "A_SECRET"))[0].score == 12.0
    given.close()


WORLD = """
import os
TOKEN = os.environ["A_SECRET"]

class World:
    def reset(self, *, seed, options): return TOKEN, {}
    def step(self, action): return os.environ["HF_TOKEN"], 0.0, True, False, {}
    def close(self): pass
"""


@pytest.mark.usefixtures("secrets")
def test_an_environment_is_given_the_secrets_that_are_named(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(WORLD)

    async def play(*env: str) -> Any:
        pool = EnvironmentPool(f"{tmp_path / 'world.py'}:World", {}, num_workers=1, env=env)
        try:
            async with pool.lease() as environment:
                first, _ = await environment.reset(seed=0)
                return first, (await environment.step("go"))[0]
        finally:
            await pool.aclose()

    with pytest.raises(LoadError, match=r"agent.kwargs.env lists NO_SUCH_VARIABLE"):
        asyncio.run(play("NO_SUCH_VARIABLE"))
    with pytest.raises(LoadError, match=r"(?s)A_SECRET.*agent.kwargs.env"):
        asyncio.run(play())
    with pytest.raises(Exception, match=r"(?s)KeyError: 'HF_TOKEN'.*agent.kwargs.env"):
        asyncio.run(play("A_SECRET"))
    assert asyncio.run(play("A_SECRET", "HF_TOKEN")) == ("12", "h")


LOADS = """
import os, time
{load}

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "die":
        open(__file__ + ".broken", "w").close()
        os._exit(3)
    if solution_str == "slow":
        while not os.path.exists(__file__ + ".tried"):  # another process
            time.sleep(0.01)
        time.sleep(0.15)
    return 1.0
"""


def once_loaded(tmp_path: Path, then: str, num_workers: int = 1) -> RewardPool:
    """A scorer that does `then` in the loads after a sample has ended its process."""
    file = tmp_path / "loads.py"
    file.write_text(LOADS.format(load=f"if os.path.exists(__file__ + '.broken'):\n    {then}"))
    return RewardPool(f"{file}:compute_score", num_workers=num_workers, timeout_s=60.0)


def test_a_process_that_dies_while_it_loads_again_is_replaced(tmp_path: Path) -> None:
    pool = once_loaded(tmp_path, "os.remove(__file__ + '.broken'); os._exit(9)")
    outcomes = score(pool, ("", 1), ("die", 2), ("", 3))
    pool.close()
    assert [outcome.error.kind if outcome.error else outcome.score for outcome in outcomes] == [1.0, "died", 1.0]


@pytest.mark.parametrize("then", ["os._exit(9)", "raise RuntimeError('gone')"])
def test_a_function_that_loads_no_more_fails_the_samples_and_not_the_run(tmp_path: Path, then: str) -> None:
    pool = once_loaded(tmp_path, then)
    outcomes = score(pool, ("", 1), ("die", 2), ("", 3), ("", 4))
    assert [outcome.error.kind if outcome.error else outcome.score for outcome in outcomes] == [1.0, "died", "died", "died"]
    assert outcomes[3].error is not None and "load" in outcomes[3].error.message
    os.remove(tmp_path / "loads.py.broken")
    assert score(pool, ("", 1))[0].score == 1.0
    pool.close()
    (tmp_path / "loads.py.broken").touch()
    with pytest.raises(LoadError, match="cannot load"):
        RewardPool(f"{tmp_path / 'loads.py'}:compute_score").start()


def test_processes_that_do_not_start_leave_the_work_to_the_one_that_lives(tmp_path: Path) -> None:
    pool = once_loaded(tmp_path, "open(__file__ + '.tried', 'a').write('x'); os._exit(9)", num_workers=2)
    assert score(pool, ("", 1))[0].score == 1.0
    (tmp_path / "loads.py.broken").touch()
    assert [outcome.score for outcome in score(pool, *[("slow", 1)] * 12)] == [1.0] * 12
    pool.close()
    assert (tmp_path / "loads.py.tried").exists(), "it was to want another process"


def test_what_a_call_imports_does_not_count_as_its_time(tmp_path: Path) -> None:
    """A slow library, first imported inside the function, with a deadline that is shorter; and each fresh process again."""
    (tmp_path / "slow_library.py").write_text("import time\ntime.sleep(4)\nNUMBER = 4\n")
    (tmp_path / "lazy.py").write_text(
        "import importlib, os, time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if solution_str == 'by name': return importlib.import_module('slow_library').NUMBER\n"
        "    from slow_library import NUMBER\n"
        "    if solution_str == 'die': os._exit(1)\n"
        "    if solution_str == 'sleep': time.sleep(600)\n"
        "    return NUMBER\n"
    )
    pool = RewardPool(f"{tmp_path / 'lazy.py'}:compute_score", num_workers=1, timeout_s=3.0)
    try:
        assert [outcome.score for outcome in score(pool, ("", 0), ("", 0))] == [4.0, 4.0]
        died, slept, fine = score(pool, ("die", 0), ("sleep", 0), ("by name", 0))
        assert died.error is not None and died.error.kind == "died"
        assert slept.error is not None and slept.error.kind == "timeout" and fine.score == 4.0
    finally:
        pool.close()


def test_an_environment_may_import_in_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "slow_simulator.py").write_text("import time\ntime.sleep(4)\n")
    (tmp_path / "lazy_world.py").write_text(
        "class World:\n"
        "    def reset(self, *, seed, options): return 'begin', {}\n"
        "    def step(self, action):\n"
        "        import slow_simulator\n"
        "        return 'end', 1.0, True, False, {}\n"
        "    def close(self): pass\n"
    )

    async def play() -> Any:
        limits = EnvironmentLimits(reset_timeout_s=60.0, step_timeout_s=3.0)
        pool = EnvironmentPool(f"{tmp_path / 'lazy_world.py'}:World", {}, num_workers=1, limits=limits)
        try:
            async with pool.lease() as environment:
                await environment.reset(seed=0)
                return (await environment.step("go"))[:3]
        finally:
            await pool.aclose()

    assert asyncio.run(play()) == ("end", 1.0, True)
