"""What `@register` notes, and the table of modes."""

from __future__ import annotations

from typing import Any

import pytest

from rlhub.errors import DispatchError
from rlhub.single_controller import Dispatch, Execute, register, register_dispatch_mode, update_dispatch_mode
from rlhub.single_controller.decorator import get_dispatch_mode, registered_methods


class Base:
    @register()
    def plain(self) -> None: ...

    @register(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO, blocking=False, materialize_futures=False, deadline="infer")
    def special(self) -> None: ...

    def unmarked(self) -> None: ...


class Derived(Base):
    def plain(self) -> None:
        """Overrides without a mark of its own."""

    @register(Dispatch.DP_COMPUTE)
    async def added(self) -> None: ...


def test_marks_are_found_with_their_settings() -> None:
    methods = registered_methods(Derived)
    assert set(methods) == {"plain", "special", "added"}
    assert methods["special"].rank_zero and not methods["special"].blocking and not methods["special"].materialize_futures
    assert methods["plain"].mode.name == "ALL_TO_ALL" and methods["plain"].blocking
    assert methods["added"].mode.name == "DP_COMPUTE"


def test_a_method_names_one_of_the_runs_deadlines() -> None:
    methods = registered_methods(Derived)
    assert {name: spec.deadline for name, spec in methods.items()} == {"plain": "update", "special": "infer", "added": "update"}
    with pytest.raises(DispatchError, match="no deadline 'updat'; did you mean 'update'.* known: resources, cluster, start"):

        class Wrong:
            @register(deadline="updat")
            def method(self) -> None: ...


def _dispatch(group: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    return [[value] * group.world_size for value in args], {}


def _collect(group: Any, outputs: list[Any]) -> Any:
    return outputs


def test_new_modes_get_a_name_and_can_be_replaced_but_not_taken() -> None:
    register_dispatch_mode("TEST_NEW_MODE", _dispatch, _collect)
    assert Dispatch.TEST_NEW_MODE == "TEST_NEW_MODE"
    with pytest.raises(DispatchError, match="exists already"):
        register_dispatch_mode("TEST_NEW_MODE", _dispatch, _collect)
    update_dispatch_mode("TEST_NEW_MODE", _dispatch, lambda group, outputs: "replaced")
    assert get_dispatch_mode(Dispatch.TEST_NEW_MODE).collect_fn(None, []) == "replaced"


def test_unknown_modes_are_named_with_the_nearest_known_one() -> None:
    with pytest.raises(AttributeError, match="ONE_TO_ALL"):
        _ = Dispatch.ONE_TO_AL
    with pytest.raises(DispatchError, match="did you mean 'DP_COMPUTE'"):
        get_dispatch_mode("DP_COMPUT")
    with pytest.raises(DispatchError, match="did you mean"):
        update_dispatch_mode("DP_COMPUT", _dispatch, _collect)


def test_a_dict_mode_needs_both_functions() -> None:
    with pytest.raises(DispatchError, match="dispatch_fn and collect_fn"):
        register({"dispatch_fn": _dispatch})
