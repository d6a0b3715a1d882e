"""Watches, while a run works, whether the head of the cluster still answers.

Without it (the GCS, in Ray's words) pending calls go on, but nothing new is placed and no death is reported.  Ray 2.58
ends the driver by itself after 60 s, with a line of its own and nothing cleaned up; so a run ends before that, by an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

from rlhub.errors import ClusterLostError
from rlhub.single_controller.ray.nodes import silence

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
ANSWER_S = 10.0
"""Longest wait for one answer; on a machine that is very busy it may take seconds."""
LEAST_ASKED = 3
"""A process that was stopped itself, or whose interpreter was busy for long, misses one answer and gets the next."""
LATEST_S = 50.0
"""Ray's own limit is 60 s (gcs_rpc_server_reconnect_timeout_s)."""


class ClusterWatch:
    """A thread that asks the head at host:port every second.

    deadline_s: the head may be silent for so long (trainer.deadline_s.cluster).  owned: it is on this machine and is never
    started again, so that a refused connection is its end.
    """

    def __init__(self, host: str, port: int, *, deadline_s: float, owned: bool) -> None:
        self.host, self.port, self.owned = host, port, owned
        self.deadline_s = min(deadline_s, LATEST_S)
        self.error: ClusterLostError | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch-cluster", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch; `error` stays."""
        self._stopped.set()

    def _look(self) -> None:
        silent_since, in_vain = 0.0, 0
        while not self._stopped.wait(LOOK_EVERY_S):
            asked = time.monotonic()
            why = silence(self.host, self.port, min(ANSWER_S, self.deadline_s / LEAST_ASKED))
            if why is None:
                in_vain = 0
                continue
            silent_since, in_vain = (silent_since if in_vain else asked), in_vain + 1
            late = in_vain >= LEAST_ASKED and time.monotonic() - silent_since >= self.deadline_s
            gone = self.owned and isinstance(why, ConnectionRefusedError)
            if (late or gone) and not self._stopped.is_set():
                self.error = self._lost(why, gone=gone)
                logger.error("%s", self.error)
                for listener in list(_listeners):
                    listener.cluster_lost(self.error)
                return

    def _lost(self, why: OSError, *, gone: bool) -> ClusterLostError:
        what = "has ended" if gone else f"has not answered for {self.deadline_s:g} s (trainer.deadline_s.cluster)"
        return ClusterLostError(
            f"the head of the Ray cluster at {self.host}:{self.port} {what}: {why}. The run cannot go on without it; see whether "
            "its machine ran out of memory, then start the command again: it goes on from the newest checkpoint"
        )


class Listener(Protocol):
    """Learns once, from the watch's thread, that the cluster is lost."""

    def cluster_lost(self, error: ClusterLostError) -> None: ...


_listeners: WeakSet[Listener] = WeakSet()
_current: ClusterWatch | None = None
"""A process is in one cluster at a time."""


def watch_cluster(host: str, port: int, *, deadline_s: float, owned: bool) -> None:
    """Watches this cluster from now on, in place of another."""
    global _current
    unwatch()
    _current = ClusterWatch(host, port, deadline_s=deadline_s, owned=owned)


def unwatch() -> None:
    """Ends the watch when the cluster is left.  That one was lost is remembered until another is watched."""
    global _current
    if _current is not None:
        _current.stop()
        _current = _current if _current.error is not None else None


def loss() -> ClusterLostError | None:
    """Returns the error, when the cluster is lost."""
    return _current.error if _current is not None else None


def head_answers() -> bool:
    """Returns whether the head of the cluster that is watched answers now; it may have ended since the last look."""
    return _current is None or silence(_current.host, _current.port, ANSWER_S) is None


def while_it_lives(ask: Callable[[], object]) -> None:
    """Calls the head, but waits no longer when the cluster is lost meanwhile: Ray would, for a minute or more."""
    asking = threading.Thread(target=ask, name="ask-head", daemon=True)
    asking.start()
    while asking.is_alive() and loss() is None:
        asking.join(LOOK_EVERY_S)


def check_cluster() -> None:
    """Raises ClusterLostError when the cluster is lost; every wait in Ray calls it now and then."""
    if (error := loss()) is not None:
        raise error


def listen(listener: Listener) -> None:
    """Reports a loss to `listener`, as long as it is alive; at once where the cluster is lost already."""
    _listeners.add(listener)
    if (error := loss()) is not None:
        listener.cluster_lost(error)
