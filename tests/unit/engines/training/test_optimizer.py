"""The learning rate of every engine, and moving storages to host memory and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhub.config.sections.training import OptimConfig
from rlhub.engines.training.optimizer import HostCopies, HostTensors, learning_rate
from rlhub.models import device_copies


def rates(steps: int, **config: object) -> list[float]:
    return [learning_rate(OptimConfig(lr=2.0, **config), step) for step in range(steps)]


def test_constant_and_warmup() -> None:
    assert rates(3) == [2.0] * 3
    assert rates(4, lr_warmup_steps=4) == [0.5, 1.0, 1.5, 2.0]
    assert rates(3, lr_warmup_steps_ratio=0.2, total_training_steps=10) == [1.0, 2.0, 2.0]
    assert rates(2, lr_warmup_steps=0, lr_warmup_steps_ratio=0.5, total_training_steps=10) == [2.0, 2.0]


def test_cosine_ends_at_its_floor() -> None:
    got = rates(9, lr_scheduler_type="cosine", lr_warmup_steps=2, total_training_steps=6, min_lr_ratio=0.1)
    expected = [1.0, 2.0] + [2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 4))) for k in range(4)] + [0.2] * 3
    assert got == pytest.approx(expected)


def test_views_survive_a_stay_in_host_memory() -> None:
    buffer, gradient = torch.arange(10.0), torch.ones(3)
    view, again = buffer[2:6].view(2, 2), buffer[4:]
    host = HostCopies()
    host.empty([view, again])  # one storage, moved once
    host.empty([gradient], keep=False)
    assert buffer.untyped_storage().nbytes() == gradient.untyped_storage().nbytes() == 0
    host.restore()
    assert torch.equal(buffer, torch.arange(10.0)) and torch.equal(view, torch.tensor([[2.0, 3.0], [4.0, 5.0]]))
    assert torch.equal(gradient, torch.zeros(3))
    again[0] = -1
    assert buffer[4] == -1 and not host.stored


class FakeStream:
    """A stream that notes what it waits for and what is done on it."""

    def __init__(self, fake: FakeDevice, name: str) -> None:
        self.fake, self.name = fake, name

    def wait_stream(self, other: FakeStream) -> None:
        self.fake.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> FakeEvent:
        self.fake.log.append(f"event on {self.name}")
        return FakeEvent(self.fake)


class FakeEvent:
    def __init__(self, fake: FakeDevice) -> None:
        self.fake = fake

    def synchronize(self) -> None:
        self.fake.log.append("host waits")


class FakeDevice(TorchDispatchMode):
    """A device with streams, on CPU: a module as torch.cuda is one, which notes the order of copies and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.main = self.current = FakeStream(self, "main")

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, "side")

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.main

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name == "copy_":
            target: Tensor = args[0]
            queued = len(args) > 2 and bool(args[2])
            self.log.append(
                f"{self.current.name} copies {target.numel() * target.element_size()}{'' if queued else ', blocking'}"
            )
        elif name == "add_":
            self.log.append(f"{self.current.name} computes")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    found = FakeDevice()
    monkeypatch.setattr(device_copies, "streams_of", lambda device: found)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: found.log.append(f"kept for {stream.name}"))
    return found


def test_states_come_and_go_on_a_stream_of_their_own(fake: FakeDevice) -> None:
    """The device waits for what comes before it computes, the way back waits for what it computed, and the host for nothing until
    it reads; a second step waits for the first one's way back, because it is on the same stream."""
    states = [torch.ones(8), torch.zeros(3)]
    hosted = HostTensors(states)
    homes = [state.data_ptr() for state in states]
    with fake, hosted.on_device(torch.device("cpu")):
        assert [state.data_ptr() for state in states] != homes
        states[0].add_(1)
    kept = "kept for side"
    coming = ["side waits for main", "side copies 32", kept, "side copies 12", kept, "main waits for side"]
    going = ["side waits for main", "side copies 32", kept, "side copies 12", kept, "event on side"]
    assert fake.log == [*coming, "main computes", *going]
    assert [state.data_ptr() for state in states] == homes and torch.equal(states[0], torch.full((8,), 2.0))
    fake.log.clear()
    hosted.wait()
    hosted.wait()
    assert fake.log == ["host waits"]  # once for each step


def test_a_step_that_fails_brings_its_states_home(fake: FakeDevice) -> None:
    states = [torch.ones(8)]
    hosted, home = HostTensors(states), states[0].data_ptr()
    with pytest.raises(RuntimeError, match="step"), hosted.on_device(torch.device("cpu")):
        raise RuntimeError("step")
    assert states[0].data_ptr() == home


def test_without_states_in_host_memory_nothing_is_copied() -> None:
    with HostTensors([]).on_device(torch.device("cuda", 7)):
        pass
    states = [torch.ones(2)]
    hosted, home = HostTensors(states), states[0].data_ptr()
    with hosted.on_device(torch.device("cpu")):  # is there already
        assert states[0].data_ptr() == home
        states[0].add_(1)
    hosted.wait()
    assert torch.equal(states[0], torch.full((2,), 2.0))
