"""A vision-language-action policy in the hf engine and the FSDP2 engine: log-probs, gradients, weights and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from rlhub.algorithms.registry import POLICY_LOSSES
from rlhub.engines.rollout.base import SamplingParams
from rlhub.engines.training.base import ForwardOutputs, LossOutput, Rows
from rlhub.errors import ConfigError, EngineError, RequestError, WeightMismatchError
from rlhub.models.hf import save_sidecars
from rlhub.models.vla.policy import hidden_states, place_tokens
from rlhub.sharding_manager.manager import ShardingManager
from rlhub.workers.base import load_engine, save_engine
from tests.integration.fsdp_ranks import Ranks
from tests.integration.vla_checks import limited, updated
from tests.support import vla
from tests.support.vla import BINS, DECODINGS, FIRST_BIN, TOKENS

pytestmark = pytest.mark.usefixtures("process_group")
SAMPLING = SamplingParams(max_new_tokens=TOKENS)
every_decoding = pytest.mark.parametrize("decoding", DECODINGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vla.write_policy(tmp_path_factory.mktemp("vla") / "model")


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2, preload="tests.integration.vla_checks")
    yield ranks
    ranks.close()


def batch(folder: Path, decoding: str, count: int = 9) -> dict[str, Tensor]:
    asked = vla.requests(count)
    answers = vla.rollout_engine(vla.model_config(folder, decoding)).generate(asked, SAMPLING)
    generator = torch.Generator().manual_seed(2)
    rows = vla.training_rows(asked, answers)
    shape = rows["response_mask"].shape
    advantages = torch.randn(count, 1, generator=generator).expand(shape).contiguous()
    old = torch.tensor([answer.log_probs for answer in answers]) + 0.2 * torch.randn(shape, generator=generator)
    others = {"rollout_log_probs": old - 0.1, "values": torch.randn(shape, generator=generator), "returns": advantages + 0.5}
    selected = (torch.rand(shape, generator=generator) < 0.3).to(torch.uint8)
    return rows | {"advantages": advantages, "old_log_probs": old, "selected": selected, **others}


@every_decoding
def test_rollout_and_trainer_agree_at_each_step(folder: Path, decoding: str) -> None:
    """Over three updates, with the weights synchronised and compared each time."""
    model = vla.model_config(folder, decoding)
    rollout, trainer = vla.rollout_engine(model, load=False), vla.train_engine(model, rows=4)
    manager = ShardingManager(trainer, rollout, bucket_bytes=1 << 16)

    def loss(outputs: ForwardOutputs, micro: Rows) -> LossOutput:
        assert outputs.log_probs is not None and outputs.values is not None
        chosen = outputs.log_probs * micro["response_mask"] * (micro["input_ids"][:, -TOKENS:] - FIRST_BIN - 2)
        return LossOutput(loss=(outputs.values - 1).square().sum() / 64 - chosen.sum() / 64)

    before: list[list[float]] = []
    for version in range(1, 4):
        assert manager.sync(version).num_weights == len(trainer.params)
        answers = rollout.generate(asked := vla.requests(11), SAMPLING)
        rows = vla.training_rows(asked, answers)
        found = trainer.infer(rows, outputs=("log_probs", "entropy", "values"))
        sampled = torch.tensor([answer.log_probs for answer in answers]) * rows["response_mask"]
        assert (found["log_probs"] - sampled).abs().max() < 1e-5
        own = [answer.value for answer in answers]
        assert own == pytest.approx(found["values"][:, 0].tolist(), abs=1e-5)
        assert 0 < float(found["entropy"].max()) <= torch.tensor(BINS).log() + 1e-5
        assert all(FIRST_BIN <= token < FIRST_BIN + BINS for answer in answers for token in answer.token_ids)
        assert {version for answer in answers for version in answer.versions} == {version}
        assert before != [answer.log_probs for answer in answers]
        before = [answer.log_probs for answer in answers]
        trainer.forward_backward(rows, loss, outputs=("log_probs", "values"))
        assert not trainer.optimizer_step().skipped


@every_decoding
def test_log_probs_are_those_of_the_textbook(folder: Path, decoding: str) -> None:
    """transformers' own model with the whole head, one row without padding, normalised over the bins alone."""
    rows = batch(folder, decoding)
    found = vla.train_engine(vla.model_config(folder, decoding), rows=2, train=False).infer(rows, outputs=("log_probs",))
    plain = AutoModelForImageTextToText.from_pretrained(folder).eval()
    for row in range(len(rows["input_ids"])):
        keep = rows["attention_mask"][row].bool()
        ids, pixels = rows["input_ids"][row][keep][None], rows["pixel_values"][row][None].float() / 127.5 - 1
        answer = ids[0, -TOKENS:].clone()
        mask = None
        if decoding != "sequential":
            ids[0, -TOKENS:] = torch.arange(vla.FIRST_PLACE, vla.FIRST_PLACE + TOKENS)
        if decoding == "bidirectional":
            mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            mask[-TOKENS:, -TOKENS:] = True
            mask = mask[None, None]
        with torch.no_grad():
            logits = plain(input_ids=ids, pixel_values=pixels, attention_mask=mask).logits[0]
        at = logits[-TOKENS:] if decoding != "sequential" else logits[-TOKENS - 1 : -1]
        wanted = at[:, FIRST_BIN : FIRST_BIN + BINS].log_softmax(-1).gather(1, (answer - FIRST_BIN)[:, None])[:, 0]
        torch.testing.assert_close(found["log_probs"][row], wanted * rows["response_mask"][row], rtol=0, atol=1e-5)


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() <= 1e-5 * max(largest, 1.0), name
    assert all(bool(gradient.any()) for name, gradient in wanted.items() if name.startswith(("model.vision", "model.conn")))


@every_decoding
def test_gradients_do_not_depend_on_cuts_or_ranks(folder: Path, decoding: str, two_ranks: Ranks) -> None:
    rows = batch(folder, decoding)
    whole, metrics = updated(str(folder), rows, decoding, None, False)
    assert metrics["actor/vf_loss"] > 0 and bool(whole["v_head.weight"].any())
    for micro in (1, 4):
        cut, same = updated(str(folder), rows, decoding, micro, False)
        close(cut, whole)
        assert same["actor/loss"] == pytest.approx(metrics["actor/loss"], abs=1e-5)
    for micro, uneven in ((None, False), (2, False), (3, True)):  # uneven: one rank has no row, but the same weights
        for found, same in two_ranks.call(updated, str(folder), rows, decoding, micro, uneven):
            close(found, whole)
            assert same["actor/loss"] == pytest.approx(metrics["actor/loss"], abs=1e-5)


def test_all_ranks_end_a_batch_with_the_same_step(folder: Path, two_ranks: Ranks) -> None:
    """Also the one that has no rows, and so sees no distance of its own."""
    rows = batch(folder, "causal")
    rows["old_log_probs"] = rows["old_log_probs"] + 0.3
    for target, steps in ((0.1, 1), (10.0, 3)):
        taken = two_ranks.call(limited, str(folder), rows, target)
        assert [metrics["actor/optimizer_steps"] for metrics in taken] == [steps, steps]
        assert all(0.1 < metrics["actor/ppo_kl"] < 10 for metrics in taken)


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
@pytest.mark.parametrize("loss", POLICY_LOSSES.names())
def test_every_loss_updates_at_every_level(folder: Path, loss: str, level: str) -> None:
    """Through the engine: cut or whole, the gradient is the same and reaches the vision part."""
    rows = batch(folder, "causal", count=5)
    whole, metrics = updated(str(folder), rows, "causal", None, False, loss, log_prob_level=level)
    cut, _ = updated(str(folder), rows, "causal", 2, False, loss, log_prob_level=level)
    close(cut, whole)
    assert metrics["actor/optimizer_steps"] == 1 and metrics["actor/grad_norm"] > 0


@every_decoding
def test_a_flipped_pixel_changes_log_probs(folder: Path, decoding: str) -> None:
    rows, engine = batch(folder, decoding), vla.train_engine(vla.model_config(folder, decoding), train=False)
    before = engine.infer(rows, outputs=("log_probs",))["log_probs"]
    pixels = rows["pixel_values"].clone()
    pixels[2, 0, 1, 5, 7] ^= 255
    after = engine.infer({**rows, "pixel_values": pixels}, outputs=("log_probs",))["log_probs"]
    assert not torch.equal(after[2], before[2])
    assert torch.equal(after[[0, 1, 3]], before[[0, 1, 3]])


def test_a_flipped_weight_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = vla.model_config(folder)
    rollout, trainer = vla.rollout_engine(model, load=False), vla.train_engine(model, train=False)
    update = rollout.update_weights

    def corrupted(buckets: Any, version: int) -> None:
        update(buckets, version)
        view = next(piece.tensor for piece in rollout.live_weights() if "vision_model" in piece.name).view(-1)
        view[7] = torch.nextafter(view[7], torch.tensor(torch.inf))

    monkeypatch.setattr(rollout, "update_weights", corrupted)
    with pytest.raises(WeightMismatchError, match="vision_model"):
        ShardingManager(trainer, rollout, bucket_bytes=1 << 16).sync(1)


def test_saved_exported_and_reloaded_equal(folder: Path, tmp_path: Path) -> None:
    """The checkpoint's shards into a new engine, and its Hugging Face folder into both engines and into transformers."""
    model, rows = vla.model_config(folder), batch(folder, "causal")
    trained = vla.train_engine(model)
    head = {param.name: param for param in trained.params}["v_head.weight"].param
    with torch.no_grad():
        head.normal_()
    outputs = trained.infer(rows, outputs=("log_probs", "values"))
    assert outputs["values"].abs().max() > 0.1
    save_engine(trained, tmp_path, 0, 1)
    save_sidecars(model, tmp_path / "huggingface", "vla")
    again = vla.train_engine(model)
    load_engine(again, tmp_path)
    reloaded = vla.train_engine(vla.model_config(tmp_path / "huggingface"), train=False)
    for engine in (again, reloaded):
        found = engine.infer(rows, outputs=("log_probs", "values"))
        assert all(torch.equal(found[name], outputs[name]) for name in outputs)
    served = vla.rollout_engine(vla.model_config(tmp_path / "huggingface"))
    assert all(torch.equal(p.tensor, dict(trained.model.named_parameters())[p.name]) for p in served.live_weights())
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "huggingface")
    ours = dict(trained.model.named_parameters())
    assert all(torch.equal(weight, ours[name]) for name, weight in plain.named_parameters())


@every_decoding
def test_single_requests_are_answered_as_a_batch_is(folder: Path, decoding: str) -> None:
    engine, asked = vla.rollout_engine(vla.model_config(folder, decoding)), vla.requests(7)
    whole = engine.generate(asked, SAMPLING)

    async def each() -> list[Any]:
        return await asyncio.gather(*(engine.agenerate(request, SAMPLING) for request in asked))

    single = asyncio.run(each())
    assert [one.token_ids for one in single] == [one.token_ids for one in whole]
    for one, other in zip(single, whole, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5) and one.finish_reason == "length"
    greedy = SamplingParams(max_new_tokens=TOKENS, temperature=0.0)
    assert engine.generate(asked, greedy) == engine.generate(asked, greedy)
    engine.shutdown()


def test_two_cameras(folder: Path) -> None:
    """As many images as the response has actions: the columns are told apart by more than their size."""
    model, asked = vla.model_config(folder), vla.requests(5, num_images=2)
    answers = vla.rollout_engine(model).generate(asked, SAMPLING)
    rows = vla.training_rows(asked, answers)
    found = vla.train_engine(model, rows=2, train=False).infer(rows, outputs=("log_probs",))["log_probs"]
    sampled = torch.tensor([answer.log_probs for answer in answers]) * rows["response_mask"]
    assert (found - sampled).abs().max() < 1e-5


def test_requests_that_cannot_be_answered(folder: Path) -> None:
    engine, (good,) = vla.rollout_engine(vla.model_config(folder)), vla.requests(1)
    with pytest.raises(RequestError, match="images are none"):
        good.images, images = None, good.images
        engine.generate([good], SAMPLING)
    with pytest.raises(RequestError, match="images are torch.float32"):
        good.images = images.float()
        engine.generate([good], SAMPLING)
    good.images = images
    with pytest.raises(RequestError, match="a response has chunk x action_dim = 4 tokens"):
        engine.generate([good], SamplingParams(max_new_tokens=3))


def test_rows_that_cannot_be_trained_on(folder: Path) -> None:
    rows, engine = batch(folder, "causal"), vla.train_engine(vla.model_config(folder), train=False)
    ids = rows["input_ids"].clone()
    ids[1, -1] = FIRST_BIN + BINS
    with pytest.raises(EngineError, match="a token that is no action: these are 11 to 15"):
        engine.infer({**rows, "input_ids": ids}, outputs=("log_probs",))
    with pytest.raises(EngineError, match="reads uint8"):
        engine.infer({**rows, "pixel_values": rows["pixel_values"].float()}, outputs=("log_probs",))
    without = vla.train_engine(vla.model_config(folder, value_head=False), train=False)
    with pytest.raises(EngineError, match="model.vla.value_head=True"):
        without.infer(rows, outputs=("values",))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"first_bin_id": 62}, r"token ids \[66\] of place_ids and of the last bin"),
        ({"place_ids": [3]}, "token 3 stands for a part of an image"),
        ({"place_ids": [7, 8]}, "place_ids has 2 ids; with decoding=causal give 1, or chunk x action_dim = 2 x 2 = 4"),
        ({"action_low": [0.0] * 3}, "action_low has 3 numbers"),
        ({"chunks": 2}, "model.vla.chunks: no such setting; did you mean 'chunk'"),
        ({"decoding": "parallel"}, "model.vla.decoding: got 'parallel'"),
    ],
)
def test_settings_that_do_not_fit_the_model(folder: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        vla.train_engine(vla.model_config(folder, **changes), train=False)


def test_places_see_each_other_only_where_they_should(folder: Path) -> None:
    """A later place's token changes the state at an earlier one with decoding=bidirectional, and not with causal."""
    engine = vla.train_engine(vla.model_config(folder), train=False)
    rows = batch(folder, "causal", count=2)
    changed = {}
    for decoding in ("causal", "bidirectional"):
        states = []
        for last in (FIRST_BIN - 1, FIRST_BIN - 2):
            given = vla.model_config(folder, decoding, place_ids=[7, 8, 9, last])
            settings = vla.train_engine(given, train=False).vla
            assert settings is not None
            placed = place_tokens(rows["input_ids"], rows["attention_mask"], TOKENS, settings)
            with torch.no_grad():
                states.append(hidden_states(engine.model, settings, placed, rows["pixel_values"])[placed.sources[:, 0]])
        changed[decoding] = not torch.equal(*states)
    assert changed == {"causal": False, "bidirectional": True}
