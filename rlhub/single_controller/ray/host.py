"""`WorkerHost`: the Ray actor of one rank.  It hosts the workers of all roles of its pool and runs their methods.

The actor is synchronous with one thread, so methods run in the process's main thread, in the order in which they were sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhub.errors import DispatchError
from rlhub.protocol import DataProto
from rlhub.single_controller.invoke import RoleHost
from rlhub.single_controller.ray.process import HostIdentity, HostSetup, own_identity, prepare_process
from rlhub.single_controller.worker import ClassWithInitArgs, WorkerContext


@dataclass(slots=True, kw_only=True, frozen=True)
class CallHeader:
    """What to run.  The values follow as arguments of the actor call, because Ray fetches references only there; the last
    `len(keywords)` of them are keyword arguments.  reply: False keeps the output in the worker.  step: the driver's, for
    the fault plan."""

    role: str
    method: str
    keywords: tuple[str, ...]
    materialize: bool
    reply: bool
    step: int


class WorkerHost:
    """See the module docstring."""

    def __init__(self) -> None:
        self._roles = RoleHost()

    def identity(self) -> HostIdentity:
        """Where this process is."""
        return own_identity()

    def prepare(self, setup: HostSetup) -> None:
        """Take the rank's environment, log file and import path, and import the plugins."""
        prepare_process(setup)

    def add_role(self, spec: ClassWithInitArgs, context: WorkerContext) -> None:
        """Construct a role's worker."""
        self._roles.add(spec, context)

    def call(self, header: CallHeader, *values: Any) -> Any:
        """Run a method and return its output, or None where no reply is wanted."""
        output = self._run(header, values)
        return output if header.reply else None

    def call_data(self, header: CallHeader, *values: Any) -> tuple[DataProto | None, int]:
        """As `call` for a method that returns a batch; the number of rows travels apart, so it can be had without them."""
        output = self._run(header, values)
        if not header.reply:
            return None, 0
        if not isinstance(output, DataProto):
            raise DispatchError(
                f"{header.role}.{header.method} must return a DataProto for its dispatch mode, got {type(output).__name__}"
            )
        return output, len(output)

    def _run(self, header: CallHeader, values: tuple[Any, ...]) -> Any:
        split = len(values) - len(header.keywords)
        kwargs = dict(zip(header.keywords, values[split:], strict=True))
        return self._roles.call(
            header.role, header.method, values[:split], kwargs, materialize=header.materialize, step=header.step
        )

    def close(self) -> None:
        """Orderly end: let every worker release what it holds."""
        self._roles.close()
