"""The exception tree: one base, standard library parents, and pickling with fields (they cross processes)."""

from __future__ import annotations

import pickle

import pytest

from rlhub import errors

SPECIAL = [
    (errors.RlhubError("plain", extra=3), Exception),
    (errors.ConfigError(["a is wrong", "b is wrong"]), ValueError),
    (errors.RegistryError("no such thing"), LookupError),
    (errors.ProtocolError("column x"), ValueError),
    (errors.DataError("file, row"), ValueError),
    (errors.DispatchError("arguments"), ValueError),
    (errors.ResourceError("too few"), RuntimeError),
    (errors.DeadlineError("generate", 7200, "raise trainer.deadline_s.generate"), TimeoutError),
    (errors.WorkerError("boom", role="actor", rank=1, node="n1", remote_type="ValueError", remote_traceback="tb"), RuntimeError),
    (errors.WorkerDiedError("killed", role="actor", rank=0), errors.WorkerError),
    (errors.HolderLostError("killed", role="actor", rank=0), errors.WorkerError),
    (errors.WeightMismatchError("differs", weight="lm_head.weight"), RuntimeError),
    (errors.NonFiniteError("diverged", weights=("lm_head.weight",)), FloatingPointError),
    (errors.PolicyMismatchError("another policy", kl=6.14, bound=0.1), RuntimeError),
    (errors.ReshardError("other shape", weight="lm_head.weight"), ValueError),
    (errors.EngineError("asleep"), RuntimeError),
    (errors.RequestError("no such token", param="prompt"), errors.EngineError),
    (errors.VersionError("older"), ValueError),
    (errors.CheckpointError("torn"), RuntimeError),
    (errors.RewardError("failed"), RuntimeError),
    (errors.WorkflowError("keep failing"), RuntimeError),
]


DEFINED = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.RlhubError)]
PLAIN = [(cls("what happened"), Exception) for cls in DEFINED if cls not in {type(error) for error, _ in SPECIAL}]


@pytest.mark.parametrize(("error", "parent"), [*SPECIAL, *PLAIN], ids=lambda value: getattr(type(value), "__name__", ""))
def test_tree_and_pickling(error: errors.RlhubError, parent: type[Exception]) -> None:
    assert isinstance(error, errors.RlhubError) and isinstance(error, parent)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) and copy.args == error.args
    assert copy.__dict__ == error.__dict__


def test_every_class_also_has_a_parent_of_the_standard_library() -> None:
    for cls in DEFINED:
        if cls is not errors.RlhubError:
            assert any(
                base.__module__ == "builtins" and base not in (Exception, BaseException, object) for base in cls.__mro__
            ), cls


def test_config_error_lists_its_problems() -> None:
    many = errors.ConfigError(["a is wrong", "b is wrong"])
    assert many.problems == ("a is wrong", "b is wrong")
    assert str(many).splitlines() == ["2 problems in the configuration:", "  1. a is wrong", "  2. b is wrong"]
    assert str(errors.ConfigError("only this")) == "only this"


def test_messages_name_place_and_cause() -> None:
    died = errors.WorkerError("boom", role="actor", rank=1, node="10.0.0.2", remote_traceback="line 3")
    assert str(died).startswith("[actor rank 1 on 10.0.0.2] boom") and str(died).endswith("line 3")
    late = errors.DeadlineError("generate", 7200, "raise the deadline")
    assert str(late) == "generate: not done after 7200 s; raise the deadline" and late.name == "generate"
    assert str(errors.RegistryError("as it is")) == "as it is"  # LookupErrors like KeyError would show quotes
