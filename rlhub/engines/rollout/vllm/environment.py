"""The environment that vLLM needs in a process, and the end of vLLM's processes with the process that owns them.

This is the only module of the package that changes environment variables.  Building an engine seeds every global random
generator, replaces `torch.set_num_threads` by a no-op, and overwrites LOCAL_WORLD_SIZE and LD_PRELOAD; a trainer in the same
process would silently draw other batches afterwards, so `guarded_process` restores all of it.

Processes that vLLM starts end with the one that owns the engine, however that ends; an engine core would otherwise wait for
requests for ever.  Each process watches the owner itself, so nobody has to find it, and ends in an orderly way, which removes
its shared memory.  The shared memory of processes that were killed is removed by Python's resource tracker, a child that ends
after the last process that holds its pipe.  Ray kills the whole process group of a worker that died, so the tracker is started
in a session of its own.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing import resource_tracker, util

import numpy as np
import psutil
import torch

OWNER = "RLHUB_ENGINE_OWNER"
"""The variable that tells vLLM's processes which process owns them."""
ENGINE_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # runs the engine core in this process, where the weights are
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks on one machine would otherwise be bound to the same core
}
QUANTIZED_VARIABLES = {
    # Kernels of quantized linear layers that transpose, pad or requantize the weights when they load.
    "VLLM_DISABLED_KERNELS": (
        "FlashInferFp8DeepGEMMDynamicBlockScaledKernel,DeepGemmFp8BlockScaledMMKernel,B12xFp8BlockScaledMMKernel,"
        "MarlinFP8ScaledMMLinearKernel,HummingFP8ScaledMMLinearKernel"
    ),
}
DEFAULT_VARIABLES = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",  # nothing is reported to anyone unless the user asks for it
    "OMP_NUM_THREADS": "1",
}
WATCH_S = 0.5  # between two looks at the owner
GRACE_S = 5  # from the request to end until the kernel ends the process
KEPT_PREFIX = "VLLM_"  # vLLM reads its own variables while it runs, not only at start
_trackers: list[subprocess.Popen[bytes]] = []  # kept, so that no finalizer warns of a running child


def distributed_variables(*, rank: int, world_size: int, local_rank: int) -> dict[str, str]:
    """Returns the variables that vLLM's external launcher reads, for a process group that already exists."""
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank)}


def child_variables() -> dict[str, str]:
    """Returns the variables for an engine in processes of vLLM's, with this process as their owner."""
    return {OWNER: str(os.getpid()), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # a fork would copy threads' locks


@contextmanager
def guarded_process(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets `variables` and vLLM's own inside the context.

    On exit the random states, default dtype, thread count, CPU affinity and environment (except VLLM_ variables) are restored.
    """
    environment = dict(os.environ)
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    dtype, set_threads, num_threads = torch.get_default_dtype(), torch.set_num_threads, torch.get_num_threads()
    affinity = os.sched_getaffinity(0)
    for name, value in DEFAULT_VARIABLES.items():
        os.environ.setdefault(name, value)
    os.environ.update(ENGINE_VARIABLES)
    os.environ.update(variables)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
        torch.set_default_dtype(dtype)
        torch.set_num_threads = set_threads
        torch.set_num_threads(num_threads)
        os.sched_setaffinity(0, affinity)
        _restore_environment(environment)


def _restore_environment(before: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name not in before and not name.startswith(KEPT_PREFIX)]:
        del os.environ[name]
    for name, value in before.items():
        if not name.startswith(KEPT_PREFIX):
            os.environ[name] = value


def agree_on_threads() -> None:
    """Initializes torch's number of threads in a thread that steps an engine.

    OpenMP's own default applies in a new thread until torch first looks, which may be in the middle of a step.  vLLM's
    attention on CPU refuses a step that was planned for another number of threads.
    """
    torch.get_num_threads()


def own_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Returns the current CUDA stream of the thread that has built an engine, which vLLM may have changed; None on CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def agree_on_stream(stream: torch.cuda.Stream | None) -> None:
    """Makes a thread that steps an engine compute on the stream of the thread that built it.

    Every thread has its own current CUDA stream, but vLLM remembers the stream it was built on and copies sampled tokens to
    the host as soon as that stream is idle.  Tokens computed on another stream would be read before they are there.
    """
    if stream is not None:
        torch.cuda.set_stream(stream)


def settle(device: torch.device) -> None:
    """Waits for all work on the device, of every thread: streams of different threads do not wait for each other."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def owner_pid() -> int | None:
    """Returns the id of the process that owns the engine, inside vLLM's processes and while they start; None in any other
    process."""
    return int(os.environ[OWNER]) if OWNER in os.environ else None


@cache
def end_with_owner() -> None:
    """Starts a thread that ends this process of vLLM's when its owner has ended.  Does nothing in the owner itself, in
    processes without an owner, and when called again."""
    owner = owner_pid()
    if owner is not None and owner != os.getpid():
        threading.Thread(target=_watch, args=(owner,), name="owner-watch", daemon=True).start()


def _watch(owner: int) -> None:
    while lives(owner):
        time.sleep(WATCH_S)
    signal.alarm(GRACE_S)  # the kernel ends the process even if Python, shutting down, runs no threads any more
    os.kill(os.getpid(), signal.SIGTERM)


def lives(pid: int) -> bool:
    """Returns whether the process exists and has not ended; a zombie, whose parent has not waited for it yet, has ended."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def start_resource_tracker() -> None:
    """Starts this process's resource tracker, which its children share, in a session of its own.  Does nothing if one runs
    already."""
    original = util.spawnv_passfds
    util.spawnv_passfds = _spawn_apart  # type: ignore[assignment]  # it takes any sequence of descriptors
    try:
        resource_tracker.ensure_running()
    finally:
        util.spawnv_passfds = original


def _spawn_apart(path: bytes | str, arguments: Sequence[bytes | str], descriptors: Sequence[int]) -> int:
    """Starts a process as multiprocessing's `spawnv_passfds` does, but in a new session."""
    process = subprocess.Popen(
        [os.fsdecode(argument) for argument in arguments],
        executable=os.fsdecode(path),
        pass_fds=[fd for fd in descriptors if fd >= 0],
        start_new_session=True,
    )
    _trackers.append(process)
    return process.pid


def job_identity() -> str:
    """Returns a name for this job's shared-memory segments: the rendezvous address is unique among the jobs that run on one
    machine."""
    return f"{os.environ.get('MASTER_ADDR', 'local')}-{os.environ.get('MASTER_PORT', os.getpid())}"
