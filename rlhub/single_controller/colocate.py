"""Several roles in one process per rank: they share the device, and a call to one waits for the other."""

from __future__ import annotations

from collections.abc import Mapping

from rlhub.errors import DispatchError
from rlhub.single_controller.worker import ClassWithInitArgs


class ColocatedClass:
    """Role name -> worker class with its arguments, all to live in the same process on every rank."""

    def __init__(self, roles: Mapping[str, ClassWithInitArgs]) -> None:
        if not roles:
            raise DispatchError("no roles to colocate: give at least one {role: ClassWithInitArgs}")
        self.roles = dict(roles)

    def __repr__(self) -> str:
        return f"ColocatedClass({', '.join(self.roles)})"


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> ColocatedClass:
    """Join roles for one worker group; `group.spawn(set_of_roles)` then gives one group per role over the same processes."""
    return ColocatedClass(class_dict)
