"""The NVIDIA driver is asked whether our builds can run on it: real programs and libraries stand in for its own.  A compiler is
looked for as Triton does."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhub.config import devices

LIBRARY = """
int cuDriverGetVersion(int *version) { *version = %d; return 0; }
int cuInit(unsigned flags) { return %d; }
"""
MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  %s  Release Build  (root@host)  Thu Oct 19\nGCC version: 12.3.0"
)
GiveDriver = Callable[..., None]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GiveDriver]:
    """Puts a driver in place.  smi: what nvidia-smi answers, None: it fails; module: version of the kernel module;
    library: (newest CUDA version, what cuInit returns), None: it cannot be loaded."""

    def give(smi: str | None = None, module: str | None = None, library: tuple[int, int] | None = None) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{smi}'\n" if smi else "#!/bin/sh\necho failed: 12.34\nexit 9\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        if module:
            (tmp_path / "module").write_text(MODULE % module)
        if library is None:
            (tmp_path / "libcuda.so.1").write_text("")
        else:
            (tmp_path / "cuda.c").write_text(LIBRARY % library)
            command = ["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(tmp_path / "cuda.c")]
            subprocess.run(command, check=True, timeout=60)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(devices, "KERNEL_MODULE", tmp_path / "module")
    devices.driver_problem.cache_clear()
    devices.gpu_memory_gb.cache_clear()
    yield give
    devices.driver_problem.cache_clear()
    devices.gpu_memory_gb.cache_clear()


needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@needs_compiler
@pytest.mark.parametrize("version", [13000, 13020, 14000])
def test_a_driver_that_works_is_no_problem(driver: GiveDriver, version: int) -> None:
    driver(smi="580.65.06", library=(version, 0))
    assert devices.driver_problem() is None


@needs_compiler
def test_a_compatibility_library_makes_an_old_driver_do(driver: GiveDriver) -> None:
    driver(smi="570.10.02", library=(13000, 0))
    assert devices.driver_problem() is None


@needs_compiler
@pytest.mark.parametrize("given", [{"smi": "535.129.03"}, {"module": "535.129.03"}])
def test_an_old_driver_is_named_with_what_is_needed(driver: GiveDriver, given: dict[str, str]) -> None:
    driver(**given, library=(12020, 0))
    problem = devices.driver_problem()
    assert problem is not None and "535.129.03 (CUDA up to 12.2) is too old" in problem and "580 or newer" in problem


@needs_compiler
def test_a_driver_that_does_not_start_says_its_error(driver: GiveDriver) -> None:
    """803: the library is newer than the running kernel module."""
    driver(module="580.65.06", library=(13000, 803))
    problem = devices.driver_problem()
    assert problem is not None and "580.65.06 cannot be used (cuInit: error 803)" in problem and "restart" in problem


def test_a_gpu_without_a_driver(driver: GiveDriver) -> None:
    driver()
    problem = devices.driver_problem()
    assert problem is not None and "no working NVIDIA driver" in problem and "libcuda.so.1" in problem


def test_a_driver_without_its_library(driver: GiveDriver) -> None:
    driver(smi="580.65.06")
    problem = devices.driver_problem()
    assert problem is not None and "580.65.06 is there, but its library cannot be used" in problem


def test_a_driver_that_hangs(driver: GiveDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(smi="580.65.06")
    monkeypatch.setattr(devices, "ASK_DRIVER", "import time; time.sleep(60)")
    monkeypatch.setattr(devices, "DRIVER_DEADLINE_S", 0.2)
    problem = devices.driver_problem()
    assert problem is not None and "does not answer" in problem


@pytest.mark.parametrize(
    ("answer", "size"), [("81559", 81559 / 1024), ("81559\n24576", 81559 / 1024), (None, None), ("[N/A]", None)]
)
def test_memory_of_the_largest_gpu(driver: GiveDriver, answer: str | None, size: float | None) -> None:
    driver(smi=answer)
    assert devices.gpu_memory_gb() == size


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole search path, and whose folder `include` has Python's headers."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").write_text("")
    for name in ("gcc", "icc"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / name))
    return tmp_path


@pytest.mark.parametrize("compiler", [None, "icc", "icc -O2"])
def test_a_compiler_and_headers_are_no_problem(tools: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None) -> None:
    if compiler:
        monkeypatch.setenv("CC", compiler)
    assert devices.compiler_problem() is None


@pytest.mark.parametrize(
    ("missing", "compiler", "said"),
    [
        (["gcc"], None, "the C compiler gcc or clang not found"),
        (["include/Python.h"], None, "Python.h, the headers of this Python not found"),
        (["gcc", "include/Python.h"], None, "the C compiler gcc or clang and Python.h"),
        ([], "xlc -q", "the C compiler xlc not found"),
    ],
)
def test_what_is_missing_to_compile_kernels(
    tools: Path, monkeypatch: pytest.MonkeyPatch, missing: list[str], compiler: str | None, said: str
) -> None:
    for name in missing:
        (tools / name).unlink()
    if compiler:
        monkeypatch.setenv("CC", compiler)
    problem = devices.compiler_problem()
    assert problem is not None and problem.startswith(said) and "build-essential and python3." in problem
