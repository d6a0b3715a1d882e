"""What vLLM needs from a process, and what it changes there: the only place that touches environment variables.

Building an engine seeds every global random generator, replaces `torch.set_num_threads` by a no-op, and overwrites
LOCAL_WORLD_SIZE and LD_PRELOAD.  A trainer living in the same process would silently draw other batches afterwards.

Processes that vLLM starts end with the one that owns the engine, however that ends: an engine core would otherwise wait for
requests for ever.  Each of them watches for itself, so none has to be found; and each ends in an orderly way first, which removes
its shared memory.

§§ resource_tracker: Python's resource tracker, the child that removes the shared memory of processes which were killed, where it outlives them.

It ends when the last process that holds its pipe has ended.  Ray kills the whole process group of a worker that died, the tracker
with it, before that.
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
"""Tells vLLM's processes which one they belong to."""
ENGINE_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in this process, where the weights are
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks on one machine would otherwise be bound to the same core
}
DEFAULT_VARIABLES = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",  # nothing is reported to anyone unless the user asks for it
    "OMP_NUM_THREADS": "1",
}
WATCH_S = 0.5
GRACE_S = 5
KEPT_PREFIX = "VLLM_"  # vLLM reads its own variables while it runs, not only at start


def distributed_variables(*, rank: int, world_size: int, local_rank: int) -> dict[str, str]:
    """Returns what vLLM's external launcher reads, from the process group that exists."""
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank)}


def child_variables() -> dict[str, str]:
    """Returns what an engine in processes of its own needs, which belong to this one."""
    return {OWNER: str(os.getpid()), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # a fork would copy threads' locks


def owner_pid() -> int | None:
    """Returns whose engine it is, in a process of vLLM's and while these are started; None in any other."""
    return int(os.environ[OWNER]) if OWNER in os.environ else None


@cache
def end_with_owner() -> None:
    """Starts watching in a process of vLLM's, from a thread.  Does nothing in the owner itself, in others, and a second time."""
    owner = owner_pid()
    if owner is not None and owner != os.getpid():
        threading.Thread(target=_watch, args=(owner,), name="owner-watch", daemon=True).start()


def _watch(owner: int) -> None:
    while lives(owner):
        time.sleep(WATCH_S)
    signal.alarm(GRACE_S)  # the kernel's, which ends a process also where Python, on its way out, runs no thread any more
    os.kill(os.getpid(), signal.SIGTERM)


def lives(pid: int) -> bool:
    """Returns whether there is such a process that has not ended, also where its parent has not yet taken note of that."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def job_identity() -> str:
    """Names this job's shared-memory segments: the rendezvous address is unique among jobs alive on one machine."""
    return f"{os.environ.get('MASTER_ADDR', 'local')}-{os.environ.get('MASTER_PORT', os.getpid())}"


@contextmanager
def guarded_process(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets `variables` and vLLM's own for the duration; on exit random states, default dtype, thread count, CPU affinity
    and environment (but for VLLM_ variables) are as before."""
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


def agree_on_threads() -> None:
    """Makes torch's number of threads that of a thread which steps an engine.

    OpenMP's own default counts in a new thread until torch first looks, which may be in the middle of a step; vLLM's attention
    on CPU refuses a step that was planned for another number of threads.
    """
    torch.get_num_threads()


def own_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Returns the CUDA stream of the thread that has built an engine, which vLLM may have changed; None on CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def agree_on_stream(stream: torch.cuda.Stream | None) -> None:
    """Lets a thread that steps an engine compute on the stream of the thread that has built it.

    CUDA's current stream is a thread's own, but vLLM remembers the one it was built on and copies sampled tokens to the host as
    soon as that is idle: computed on another, they would be read before they are there.
    """
    if stream is not None:
        torch.cuda.set_stream(stream)


def settle(device: torch.device) -> None:
    """Waits for all that was begun on the device, by whatever thread: streams of different threads do not wait for each other."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _restore_environment(before: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name not in before and not name.startswith(KEPT_PREFIX)]:
        del os.environ[name]
    for name, value in before.items():
        if not name.startswith(KEPT_PREFIX):
            os.environ[name] = value


_started: list[subprocess.Popen[bytes]] = []


def start_apart() -> None:
    """Starts this process's tracker, which its children share, in a session of its own; does nothing where one runs already."""
    original = util.spawnv_passfds
    util.spawnv_passfds = _spawn_apart  # type: ignore[assignment]  # it takes any sequence of descriptors
    try:
        resource_tracker.ensure_running()
    finally:
        util.spawnv_passfds = original


def _spawn_apart(path: bytes | str, arguments: Sequence[bytes | str], descriptors: Sequence[int]) -> int:
    """As multiprocessing's own, but for the session."""
    process = subprocess.Popen(
        [os.fsdecode(argument) for argument in arguments],
        executable=os.fsdecode(path),
        pass_fds=[fd for fd in descriptors if fd >= 0],
        start_new_session=True,
    )
    _started.append(process)
    return process.pid
