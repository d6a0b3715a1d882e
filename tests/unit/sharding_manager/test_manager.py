import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.engines.rollout.base import RolloutEngine, SamplingParams, WeightBucket
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine
from rlhub.errors import EngineError, WeightMismatchError
from rlhub.protocol.weights.pieces import Piece, take
from rlhub.sharding_manager.manager import ShardingManager
from rlhub.sharding_manager.route import Route
from tests.support import rollout_contract as contract
from tests.support.plain_train_engine import PlainTrainEngine
from tests.support.tiny_models import greedy_reference, save_tiny_model

BUCKET = 4096
FLIPPED = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture
def model(folder: Path) -> PreTrainedModel:
    return save_tiny_model(folder)


def build(folder: Path, name: str = "hf", dtype: str = "auto") -> RolloutEngine:
    engine = build_rollout_engine(
        RolloutSetup(
            config=RolloutConfig(name=name, dtype=dtype),  # type: ignore[arg-type]
            model=ModelConfig(path=str(folder)),
            device=torch.device("cpu"),
            seed=0,
            max_prompt_length=32,
            max_response_length=32,
        )
    )
    engine.initialize()
    return engine


def corrupt_after_update(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch, corrupt: Callable[[], None]) -> None:
    update = engine.update_weights

    def update_weights(buckets: Iterable[WeightBucket], version: int) -> None:
        update(buckets, version)
        corrupt()

    monkeypatch.setattr(engine, "update_weights", update_weights)


def flip(engine: RolloutEngine, name: str) -> None:
    """Change one element of one live weight by the least possible amount."""
    view = next(piece.tensor for piece in engine.live_weights() if piece.name == name)
    view.view(-1)[7] = torch.nextafter(view.view(-1)[7], torch.tensor(torch.inf))


@pytest.mark.parametrize("name", ["hf", "fake"])
def test_sync_delivers_every_weight_and_reports_it(folder: Path, model: PreTrainedModel, name: str) -> None:
    train, rollout = PlainTrainEngine(model), build(folder, name)
    manager = ShardingManager(train, rollout, bucket_bytes=BUCKET)
    manager.sync(0)
    first = manager.sync(1)
    assert (first.version, first.num_weights) == (1, len(list(model.named_parameters())))
    assert first.bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert manager.sync(2).fingerprint == first.fingerprint
    train.perturb(1)
    second = manager.sync(3)
    assert second.fingerprint != first.fingerprint
    assert rollout.version == 3
    assert train.log.count("stream") == 1, "only the first update goes through the engine's own loader"
    expected = dict(model.named_parameters())
    for piece in rollout.live_weights():
        assert torch.equal(piece.tensor, take(expected[piece.name], piece.region))


def test_the_engine_generates_with_the_weights_of_the_last_sync(folder: Path, model: PreTrainedModel) -> None:
    train, rollout = PlainTrainEngine(model), build(folder)
    manager = ShardingManager(train, rollout, bucket_bytes=BUCKET)
    seen = []
    for version in range(2):
        manager.sync(version)
        completion = rollout.generate(contract.requests()[:1], SamplingParams(temperature=0.0, max_new_tokens=12))[0]
        assert completion.token_ids == greedy_reference(model, contract.PROMPTS[0], 12)[0]
        assert completion.versions == [version] * 12
        seen.append(completion.token_ids)
        train.perturb(3)
    assert seen[0] != seen[1]


def test_weights_are_compared_in_the_dtype_of_the_engine(folder: Path, model: PreTrainedModel) -> None:
    rollout = build(folder, dtype="bfloat16")
    report = ShardingManager(PlainTrainEngine(model), rollout, bucket_bytes=BUCKET).sync(0)
    assert report.bytes == sum(2 * parameter.numel() for parameter in model.parameters())
    assert {piece.tensor.dtype for piece in rollout.live_weights()} == {torch.bfloat16}


def test_one_flipped_element_is_caught_by_name(folder: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = build(folder)
    corrupt_after_update(rollout, monkeypatch, lambda: flip(rollout, FLIPPED))
    with pytest.raises(WeightMismatchError, match="1 of") as caught:
        ShardingManager(PlainTrainEngine(model), rollout, bucket_bytes=BUCKET).sync(0)
    assert caught.value.weight == FLIPPED
    ShardingManager(PlainTrainEngine(model), rollout, bucket_bytes=BUCKET, check=False).sync(1)


@pytest.mark.parametrize("name", [FLIPPED, "model.embed_tokens.weight"])
def test_one_flipped_element_of_a_planned_update_is_caught_and_never_serves(
    folder: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    rollout = build(folder)
    manager = ShardingManager(PlainTrainEngine(model), rollout, bucket_bytes=BUCKET)
    manager.sync(0)
    with monkeypatch.context() as broken:
        exchange = Route._exchange
        broken.setattr(Route, "_exchange", lambda self, sent: (flip(rollout, name), exchange(self, sent))[1])
        with pytest.raises(WeightMismatchError, match="1 of") as caught:
            manager.sync(1)
        assert caught.value.weight == name
    with pytest.raises(EngineError, match="update_weights"):
        rollout.generate(contract.requests(), SamplingParams(max_new_tokens=1))
    manager.sync(2)
    assert rollout.version == 2


SWAPPED = {f"model.layers.{layer}.mlp.up_proj.weight": f"model.layers.{1 - layer}.mlp.up_proj.weight" for layer in range(2)}


def swapped(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """A wrong map of names: two weights of one shape under each other's names."""
    return (dataclasses.replace(piece, name=SWAPPED.get(piece.name, piece.name)) for piece in pieces)


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_a_wrong_description_of_what_is_held_is_caught_by_the_first_update(
    folder: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """Both sides of a planned update would go through the same wrong map and agree."""
    train, rollout = PlainTrainEngine(model), build(folder)
    changed, method = (train, "local_weights") if side == "trainer" else (rollout, "live_weights")
    original = getattr(changed, method)
    monkeypatch.setattr(changed, method, lambda: swapped(original()))
    with pytest.raises(WeightMismatchError) as caught:
        ShardingManager(train, rollout, bucket_bytes=BUCKET).sync(0)
    assert caught.value.weight in SWAPPED
    with pytest.raises(EngineError, match="update_weights"):
        rollout.generate(contract.requests(), SamplingParams(max_new_tokens=1))


def test_planned_updates_are_cast_to_the_dtype_of_the_engine(folder: Path, model: PreTrainedModel) -> None:
    train, rollout = PlainTrainEngine(model), build(folder, dtype="bfloat16")
    manager = ShardingManager(train, rollout, bucket_bytes=BUCKET)
    manager.sync(0)
    train.perturb(1)
    assert manager.sync(1).bytes == sum(2 * parameter.numel() for parameter in model.parameters())
    expected = dict(model.named_parameters())
    assert all(torch.equal(piece.tensor, expected[piece.name].bfloat16()) for piece in rollout.live_weights())


def test_a_trainer_without_pieces_keeps_streaming(folder: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    train = PlainTrainEngine(model)
    monkeypatch.setattr(train, "local_weights", lambda: None)
    manager = ShardingManager(train, build(folder), bucket_bytes=BUCKET)
    fingerprints = {manager.sync(version).fingerprint for version in range(2)}
    assert len(fingerprints) == 1
    assert train.log.count("stream") == 2


def test_another_ranks_mismatch_is_raised_here_too(folder: Path, model: PreTrainedModel) -> None:
    train = PlainTrainEngine(model)
    train.reduce = lambda values, op="sum", **_: torch.tensor(3)  # type: ignore[method-assign]
    with pytest.raises(WeightMismatchError, match="another rank") as caught:
        ShardingManager(train, build(folder), bucket_bytes=BUCKET).sync(0)
    assert caught.value.weight == list(dict(model.named_parameters()))[3]


class OtherNames(PlainTrainEngine):
    """Streams what `change` makes of the weights."""

    def __init__(self, model: torch.nn.Module, change: Callable[[dict[str, Tensor]], None]) -> None:
        super().__init__(model)
        self._change = change

    def named_weights(self, *, bucket_bytes: int = 1) -> Iterator[WeightBucket]:
        weights = {name: tensor.detach() for name, tensor in self.model.named_parameters()}
        self._change(weights)
        yield list(weights.items())


def test_missing_and_extra_weights_are_caught_by_name(folder: Path, model: PreTrainedModel) -> None:
    def extra(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = torch.ones(1)

    cases = [(lambda weights: weights.pop("model.norm.weight"), "model.norm.weight"), (extra, "lm_head.weight")]
    for change, name in cases:
        rollout = build(folder)
        with pytest.raises(WeightMismatchError) as caught:
            ShardingManager(OtherNames(model, change), rollout, bucket_bytes=BUCKET).sync(0)
        assert caught.value.weight == name
        with pytest.raises(EngineError, match="update_weights"):
            rollout.generate(contract.requests(), SamplingParams(max_new_tokens=1))


def test_the_trainer_and_the_cache_never_hold_memory_together(
    folder: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, rollout = PlainTrainEngine(model), build(folder)
    wake_up = rollout.wake_up

    def logged(*, weights_only: bool = False) -> None:
        train.log.append("wake weights" if weights_only else "wake all")
        wake_up(weights_only=weights_only)

    monkeypatch.setattr(rollout, "wake_up", logged)
    ShardingManager(train, rollout, bucket_bytes=BUCKET).sync(0)
    assert [step for step in train.log if step != "local"] == ["onload", "wake weights", "stream", "offload", "wake all"]


class FreshBuckets(PlainTrainEngine):
    """Every streamed tensor is new memory; counts how many bytes of it are alive at once."""

    alive = 0
    peak = 0

    def named_weights(self, *, bucket_bytes: int = 1) -> Iterator[WeightBucket]:
        for bucket in super().named_weights(bucket_bytes=bucket_bytes):
            yield [(name, self._fresh(tensor)) for name, tensor in bucket]

    def _fresh(self, tensor: Tensor) -> Tensor:
        fresh = tensor.clone()
        self.alive += fresh.nbytes
        self.peak = max(self.peak, self.alive)
        weakref.finalize(fresh.untyped_storage(), self._freed, fresh.nbytes)
        return fresh

    def _freed(self, size: int) -> None:
        self.alive -= size


def test_no_more_than_two_buckets_are_alive(folder: Path, model: PreTrainedModel) -> None:
    train = FreshBuckets(model)
    largest = max(parameter.nbytes for parameter in model.parameters())
    report = ShardingManager(train, build(folder), bucket_bytes=BUCKET).sync(0)
    assert train.peak <= 2 * (BUCKET + largest) < report.bytes / 3
    assert train.alive == 0


def test_the_test_above_notices_hoarded_buckets(folder: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    train, rollout = FreshBuckets(model), build(folder)
    update = rollout.update_weights
    monkeypatch.setattr(rollout, "update_weights", lambda buckets, version: update(list(buckets), version))
    report = ShardingManager(train, rollout, bucket_bytes=BUCKET).sync(0)
    assert train.peak == report.bytes
