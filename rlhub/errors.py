"""The exception tree of rlhub.

Every error that a user can see derives from `RlhubError` and, where the standard library has a fitting class, from that too, so
that `except ValueError` and `except TimeoutError` work.  All of them cross process boundaries: they pickle with their fields.
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
    """One or more settings are wrong; `problems` lists all of them, each with its key and remedy."""

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
    """A DataProto would be inconsistent; the message names the column."""


class ColumnStoreError(RlhubError, LookupError):
    """A process has not, or no longer, the columns of a batch that is held by reference.  Field `key`: the batch."""

    key: str

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message, key=key)


class CoordinatorError(RlhubError, ValueError):
    """Ranks do not agree on what goes where; the message names batch, step and rank."""


class DataError(RlhubError, ValueError):
    """A data file, row or column cannot be used; the message names file, row and column."""


class DispatchError(RlhubError, ValueError):
    """Arguments of a worker-group call do not fit its dispatch mode."""


class ResourceError(RlhubError, RuntimeError):
    """The cluster lacks requested resources; the message names the request, the cluster's resources and the setting to change."""


class ClusterLostError(RlhubError, ConnectionError):
    """The cluster's head no longer answers, so that no worker can be started or reached; the message names address and remedy."""


class DeadlineError(RlhubError, TimeoutError):
    """A wait missed its deadline.  Fields: `name` of the wait, `seconds` of the deadline."""

    name: str
    seconds: float

    def __init__(self, name: str, seconds: float, hint: str = "") -> None:
        super().__init__(f"{name}: not done after {seconds:g} s{'; ' + hint if hint else ''}", name=name, seconds=seconds)


class WorkerError(RlhubError, RuntimeError):
    """A worker raised an exception.  Fields: `role`, `rank`, `node`, `remote_type` (its class), `remote_traceback`."""

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
    """A worker process ended before or during a call."""


class WeightMismatchError(RlhubError, RuntimeError):
    """The rollout engine's live weights differ from the trainer's.  Field `weight`: the first differing weight's name."""

    weight: str

    def __init__(self, message: str, *, weight: str) -> None:
        super().__init__(message, weight=weight)


class NonFiniteError(RlhubError, FloatingPointError):
    """Weights are NaN or infinite, or update after update would make them so.

    Field `weights`: names of the weights that are not finite, () where all are.
    """

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
    """Weights cannot be moved to another layout, because the two are not the same model's.  Field `weight`: the tensor's name."""

    weight: str

    def __init__(self, message: str, *, weight: str) -> None:
        super().__init__(message, weight=weight)


class EngineError(RlhubError, RuntimeError):
    """A training or rollout engine cannot serve a call in its present state."""


class RequestError(EngineError, ValueError):
    """A request for generation is wrong, so that this engine can never serve it; the engine continues with others.

    Field `param`: the wrong part, by its name in an OpenAI request; "" where it has none there.
    """

    param: str

    def __init__(self, message: str, *, param: str = "") -> None:
        super().__init__(message, param=param)


class VersionError(RlhubError, ValueError):
    """The published weights are not newer than those of the engine."""


class CheckpointError(RlhubError, RuntimeError):
    """A checkpoint is incomplete, corrupt or does not fit the job; the message names folder, file and remedy."""


class RewardError(RlhubError, RuntimeError):
    """A scorer failed, and the policy for failures stops the run."""


class WorkflowError(RlhubError, RuntimeError):
    """Episodes cannot continue: they keep failing, or the process that runs them has ended.  Its cause is the last failure."""


class RunFolderError(RlhubError, RuntimeError):
    """A run folder is used by another run, or cannot be written; the message names the folder and the remedy."""


class InjectedFaultError(RlhubError, RuntimeError):
    """A fault of the plan trainer.faults has struck."""


class LoadError(RlhubError, ImportError):
    """A function or module that the user named cannot be loaded; the message has the traceback of the cause."""
