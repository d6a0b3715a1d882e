"""The one exception tree of rlhub.

Every error a user can meet derives from `RlhubError` and, where the standard library has a fitting class, from that too,
so `except ValueError` and `except TimeoutError` keep working.  All of them cross process boundaries: they pickle with
their fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class RlhubError(Exception):
    """Base of all rlhub errors.  Keyword fields given at construction survive pickling."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.__dict__.update(fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(cls: type[RlhubError], args: tuple[Any, ...], fields: dict[str, Any]) -> RlhubError:
    error = cls.__new__(cls)
    Exception.__init__(error, *args)
    error.__dict__.update(fields)
    return error


class ConfigError(RlhubError, ValueError):
    """One or more settings are wrong; `problems` lists all of them, each naming its key and remedy."""

    problems: tuple[str, ...]

    def __init__(self, problems: str | Sequence[str]) -> None:
        listed = (problems,) if isinstance(problems, str) else tuple(problems)
        head = "" if len(listed) == 1 else f"{len(listed)} problems in the configuration:\n"
        body = listed[0] if len(listed) == 1 else "\n".join(f"  {i}. {text}" for i, text in enumerate(listed, 1))
        super().__init__(head + body, problems=listed)


class RegistryError(RlhubError, LookupError):
    """A name is not registered, or registered twice."""

    def __str__(self) -> str:
        return str(self.args[0])


class ProtocolError(RlhubError, ValueError):
    """A DataProto would be inconsistent: the message names the offending column."""


class ColumnStoreError(RlhubError, LookupError):
    """A process has not, or no longer, the columns of a batch that is held by reference.  Field `key`: the batch."""

    key: str

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message, key=key)


class DataError(RlhubError, ValueError):
    """A data file, row or column is unusable: the message names file, row and column."""


class DispatchError(RlhubError, ValueError):
    """Arguments of a worker-group call do not fit its dispatch mode."""


class ResourceError(RlhubError, RuntimeError):
    """The cluster cannot give what was asked; says what was asked, what there is, and which knob to turn."""


class ClusterLostError(RlhubError, ConnectionError):
    """The cluster's head does not answer any more, and nothing can be placed or told without it; names address and remedy."""


class DeadlineError(RlhubError, TimeoutError):
    """A named wait passed its deadline.  Fields: `name`, `seconds`."""

    name: str
    seconds: float

    def __init__(self, name: str, seconds: float, hint: str = "") -> None:
        super().__init__(f"{name}: not done after {seconds:g} s{'; ' + hint if hint else ''}", name=name, seconds=seconds)


class WorkerError(RlhubError, RuntimeError):
    """A worker raised.  Fields: `role`, `rank`, `node`, `remote_type`, `remote_traceback`."""

    role: str
    rank: int
    node: str
    remote_type: str
    remote_traceback: str

    def __init__(
        self, message: str, *, role: str, rank: int, node: str = "", remote_type: str = "", remote_traceback: str = ""
    ) -> None:
        where = f"[{role} rank {rank}{' on ' + node if node else ''}] "
        tail = f"\n--- remote traceback ---\n{remote_traceback}" if remote_traceback else ""
        super().__init__(
            where + message + tail, role=role, rank=rank, node=node, remote_type=remote_type, remote_traceback=remote_traceback
        )


class WorkerDiedError(WorkerError):
    """A worker process ended while (or before) it was called."""


class WeightMismatchError(RlhubError, RuntimeError):
    """The rollout engine's live weights differ from the trainer's.  Field `weight`: the first differing weight's name."""

    weight: str

    def __init__(self, message: str, *, weight: str) -> None:
        super().__init__(message, weight=weight)


class NonFiniteError(RlhubError, FloatingPointError):
    """Training has left the numbers: weights are NaN or infinite, or update after update would make them so.  Field `weights`:
    names of those that are, () where none is."""

    weights: tuple[str, ...]

    def __init__(self, message: str, *, weights: tuple[str, ...] = ()) -> None:
        super().__init__(message, weights=weights)


class PolicyMismatchError(RlhubError, RuntimeError):
    """The rollout engine samples from another policy than the one that is trained.  Fields: `kl` in nats a token, `bound`."""

    kl: float
    bound: float

    def __init__(self, message: str, *, kl: float, bound: float) -> None:
        super().__init__(message, kl=kl, bound=bound)


class ReshardError(RlhubError, ValueError):
    """Weights cannot be moved from one layout to another: they are not the same model's.  Field `weight`: the tensor's name."""

    weight: str

    def __init__(self, message: str, *, weight: str) -> None:
        super().__init__(message, weight=weight)


class EngineError(RlhubError, RuntimeError):
    """A training or rollout engine cannot do what was asked in its present state."""


class RequestError(EngineError, ValueError):
    """A request for generation cannot be served by this engine, whatever its state: the request is at fault and the engine goes
    on.  Field `param`: what of it, as it is called in an OpenAI request; "" where that has no name."""

    param: str

    def __init__(self, message: str, *, param: str = "") -> None:
        super().__init__(message, param=param)


class VersionError(RlhubError, ValueError):
    """Weights are not newer than those that an engine has."""


class CheckpointError(RlhubError, RuntimeError):
    """A checkpoint is incomplete, corrupt or does not fit: the message names folder, file and remedy."""


class RewardError(RlhubError, RuntimeError):
    """A reward function failed and the policy says to stop."""


class WorkflowError(RlhubError, RuntimeError):
    """Episodes cannot go on: they keep failing, or what runs them has ended.  The last failure is its cause."""


class RunFolderError(RlhubError, RuntimeError):
    """A run folder is in use by another run, or cannot be written; the message names the folder and the remedy."""


class InjectedFaultError(RlhubError, RuntimeError):
    """A fault that trainer.faults planned has struck."""


class LoadError(RlhubError, ImportError):
    """A function or module that the user named cannot be loaded; the message carries the cause's traceback."""
