"""FSDPEngine on one rank: what it holds in memory, what it refuses.  Numbers are compared in tests/integration/test_fsdp.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhub.config.sections.training import FSDPConfig, ModelConfig, OptimConfig
from rlhub.engines.training.base import ForwardOutputs, LossOutput, Rows
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.engines.training.optimizer import MOMENTS
from rlhub.errors import EngineError
from tests.support.device_moves import counted_moves, moves_of_each_use
from tests.unit.models.conftest import save_model

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
BATCH, PROMPT, RESPONSE, VOCAB = 4, 3, 8, 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("engine") / "model", vocab_size=VOCAB)


def make(folder: Path, kind: Any = "policy", train: bool = True, offload: bool = False) -> FSDPEngine:
    model, fsdp = ModelConfig(path=str(folder), enable_gradient_checkpointing=False), FSDPConfig(optimizer_offload=offload)
    engine = FSDPEngine(model, fsdp, OptimConfig(lr=1e-3) if train else None, kind=kind, device=CPU)
    engine.initialize()
    return engine


def rows() -> dict[str, torch.Tensor]:
    """Full rows: no padding that packing could save."""
    ids = torch.randint(0, VOCAB, (BATCH, PROMPT + RESPONSE), generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "response_mask": torch.ones(BATCH, RESPONSE, dtype=torch.int64),
    }


def loss(outputs: ForwardOutputs, micro: Rows) -> LossOutput:
    assert outputs.log_probs is not None
    entropy = 0 if outputs.entropy is None else outputs.entropy.sum()
    return LossOutput(loss=-outputs.log_probs.sum() - entropy, sums={"tokens": micro["response_mask"].sum()})


class Largest(TorchDispatchMode):
    """The most elements any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


def test_logits_of_all_tokens_never_exist(folder: Path) -> None:
    engine = make(folder)
    with Largest() as seen:
        engine.forward_backward(rows(), loss, outputs=("log_probs", "entropy"))
        engine.optimizer_step()
        engine.infer(rows(), outputs=("log_probs", "entropy", "sum_pi_squared"))
    assert VOCAB * 16 <= seen.elements < BATCH * RESPONSE * VOCAB
    with Largest() as seen:  # the control: the plain model's do
        engine.model.set_attn_implementation("sdpa")
        engine.model(rows()["input_ids"])
    assert seen.elements >= BATCH * RESPONSE * VOCAB


def test_infer_gives_the_sum_of_squared_probabilities(folder: Path) -> None:
    """End to end, against the whole softmax of the plain model; nothing where the response is masked."""
    engine, given = make(folder, train=False), rows()
    given["response_mask"][1, 2:4] = 0
    outputs = engine.infer(given, outputs=("log_probs", "sum_pi_squared"))
    with torch.no_grad():
        engine.model.set_attn_implementation("sdpa")
        p = engine.model(given["input_ids"]).logits[:, PROMPT - 1 : -1].softmax(-1)
    expected = p.square().sum(-1) * given["response_mask"]
    torch.testing.assert_close(outputs["sum_pi_squared"], expected, rtol=1e-5, atol=1e-8)
    assert (outputs["sum_pi_squared"][:, 1:] - expected[:, :-1]).abs().max() > 1e-6  # a position off is seen


def test_refusals(folder: Path) -> None:
    frozen = make(folder, train=False)
    assert not any(param.param.requires_grad for param in frozen.params)
    with pytest.raises(EngineError, match="without an optimizer"):
        frozen.forward_backward(rows(), loss)
    with pytest.raises(EngineError, match="without an optimizer"):
        frozen.optimizer_step()
    with pytest.raises(EngineError, match="policy engine computes"):
        frozen.infer(rows(), outputs=("values",))
    with pytest.raises(EngineError, match="does not depend"):
        make(folder).forward_backward(rows(), lambda outputs, micro: LossOutput(loss=torch.zeros(())))
    with pytest.raises(EngineError, match="initialize"):
        FSDPEngine(ModelConfig(path=str(folder)), FSDPConfig(), None, kind="policy", device=CPU).state_shards()


def test_moments_are_on_the_device_for_the_step_alone(folder: Path) -> None:
    """And a step with them in host memory is the same step, from the same memory on."""
    hosted, usual = make(folder, offload=True), make(folder)

    def step(engine: FSDPEngine) -> None:
        engine.forward_backward(rows(), loss)
        assert not engine.optimizer_step().skipped

    assert hosted.optimizer is not None
    shards = hosted.optimizer.shards
    homes = [hosted.optimizer.moment(shard, name).data_ptr() for shard in shards for name in MOMENTS]
    for _ in range(2):
        counts = moves_of_each_use(hosted, rows(), lambda: step(hosted))
        assert counts == {"infer": 0, "stream": 0, "sync": 0, "save": 0, "step": len(homes)}
        step(usual)
    assert homes == [hosted.optimizer.moment(shard, name).data_ptr() for shard in shards for name in MOMENTS]
    for found, expected in zip(hosted.state_shards(), usual.state_shards(), strict=True):
        assert found.name == expected.name and torch.equal(found.tensor, expected.tensor)
    assert max(float(hosted.optimizer.moment(shard, "exp_avg_sq").max()) for shard in shards) > 0


def test_a_skipped_step_brings_no_moments(folder: Path) -> None:
    engine = make(folder, offload=True)
    with counted_moves() as sizes:
        engine.forward_backward(rows(), lambda outputs, micro: LossOutput(loss=loss(outputs, micro).loss * torch.nan))
        assert engine.optimizer_step().skipped
    assert not sizes


def test_live_weights_are_streamed_without_copies(folder: Path) -> None:
    engine = make(folder, train=False)
    live = {param.name: param.param.data_ptr() for param in engine.params}
    streamed = {name: tensor.data_ptr() for bucket in engine.named_weights() for name, tensor in bucket}
    assert streamed == live


def test_a_batch_without_rows(folder: Path) -> None:
    engine = make(folder)
    none = {name: column[:0] for name, column in rows().items()}
    assert engine.forward_backward(none, loss) == {"loss": 0.0, "tokens": 0.0}
    report = engine.optimizer_step()
    assert report.grad_norm == 0 and not report.skipped
    assert engine.infer(none, outputs=("log_probs",))["log_probs"].shape == (0, RESPONSE)


def test_values_come_from_the_value_engine(folder: Path) -> None:
    values = make(folder, kind="value").infer(rows(), outputs=["values"])["values"]
    assert values.shape == (BATCH, RESPONSE) and values.dtype == torch.float32 and values.std() > 0


def test_scores_come_from_the_reward_engine(folder: Path) -> None:
    """One number a row; response_mask is not read."""
    engine = make(folder, kind="reward")
    batch = {name: column for name, column in rows().items() if name != "response_mask"}
    scores = engine.infer(batch, outputs=["scores"])["scores"]
    assert scores.shape == (BATCH,) and scores.dtype == torch.float32 and scores.std() > 0
    none = {name: column[:0] for name, column in batch.items()}
    assert engine.infer(none, outputs=["scores"])["scores"].shape == (0,)
    with pytest.raises(EngineError, match=r"reward engine computes \['scores'\]"):
        engine.infer(rows(), outputs=("values",))
