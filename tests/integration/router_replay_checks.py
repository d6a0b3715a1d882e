"""What the ranks of test_router_replay.py run: training engines with recorded experts beside a plain Hugging Face loop whose
routers are told the same experts by a forward of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import linear

from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.engines.rollout.hf.engine import HFEngine
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.training.base import ForwardOutputs, Rows
from rlhub.engines.training.megatron.engine import MegatronEngine
from rlhub.engines.training.micro_batch import MicroBatchConfig
from rlhub.engines.training.packing import needed_tokens
from rlhub.models.experts import RouterReplay, recording, routers_of
from rlhub.protocol.columns import dense_rows, jagged, take_rows
from rlhub.protocol.sequences import ROUTED_EXPERTS
from rlhub.workers.generation import experts_column, pad_completions, training_columns
from tests.integration.fsdp_checks import OUTPUTS, TEMPERATURE, loss_for, make_rows, plain_model, plain_outputs
from tests.integration.megatron_checks import (
    CPU,
    distance,
    fsdp_gradients,
    gradients,
    load_of_rows,
    make_engine,
    named,
    on_first_ranks,
)

PROMPT, RESPONSE = 12, 16
SHORT = 2
"""The row whose record ends three tokens early; behind it routers choose."""


def experts_of_rows(model: Any, rows: Rows, seed: int = 3) -> list[Tensor]:
    """Random experts of each row's tokens but the last, (tokens, routers, top_k)."""
    generator = torch.Generator().manual_seed(seed)
    routers: list[Any] = routers_of(model)
    lengths = rows["attention_mask"].sum(1) - 1
    lengths[SHORT] = max(int(lengths[SHORT]) - 3, 0)
    scores = (torch.rand(int(length), len(routers), routers[0].num_experts, generator=generator) for length in lengths)
    return [one.argsort(-1)[..., : routers[0].top_k] for one in scores]


def column_of(experts: Sequence[Tensor]) -> Tensor:
    return jagged(torch.cat([one.flatten(1) for one in experts]).to(torch.uint8), torch.tensor([len(one) for one in experts]))


@contextlib.contextmanager
def told(model: Any, experts: Sequence[Tensor]) -> Iterator[None]:
    """Routers of the plain model choose these experts in its next calls, one row a call."""

    def forward(number: int, router: Any, left: Iterator[Tensor], hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = linear(hidden, router.weight)
        chosen, given = logits.topk(router.top_k).indices, next(left)[: len(hidden), number]
        chosen = torch.cat([given, chosen[len(given) :]])
        weights = logits.gather(1, chosen).softmax(-1) if router.norm_topk_prob else logits.softmax(-1).gather(1, chosen)
        return logits, weights, chosen

    with contextlib.ExitStack() as stack:
        for number, router in enumerate(routers_of(model)):
            stack.enter_context(mock.patch.object(router, "forward", partial(forward, number, router, iter(experts))))
        yield


def other_in_backward(chosen: Any) -> Any:
    """The control: what a backward pass computes again takes the experts of other tokens than its forward pass."""

    def choosing(self: RouterReplay, number: int, own: Tensor) -> Tensor | None:
        found: Tensor = chosen(self, number, own)
        return found.roll(1, 0) if torch._C._current_graph_task_id() != -1 else found

    return choosing


@on_first_ranks
def agreement(path: str, case: dict[str, Any]) -> dict[str, Any]:
    """case: backend, layout, model, micro, uneven; given: "random" experts, the router's "own" ones against a loop that is told
    nothing, or "shuffled": random ones, in another order than the plain loop's; damage: see other_in_backward."""
    changes = {name: case.get(name, {}) for name in ("model", "layout")}
    micro = MicroBatchConfig(**case.get("micro", {"max_tokens": 20}))
    built = make_engine(path, "policy", case.get("backend", "megatron"), micro_batch=micro, **changes)
    rows, model, given = make_rows(), plain_model(path, "policy", torch.float32), case.get("given", "random")
    experts = own_experts(model, rows) if given == "own" else experts_of_rows(model, rows)
    recorded = shuffled(experts) if given == "shuffled" else experts
    every = rows | {ROUTED_EXPERTS: column_of(recorded)}
    number = torch.arange(len(experts))[built.dp_rank :: built.dp_size]
    number = number[:0] if case.get("uneven") and built.dp_rank else torch.arange(len(experts)) if case.get("uneven") else number
    mine = {name: take_rows(column, number) for name, column in every.items()}
    inferred = built.infer(mine, outputs=OUTPUTS["policy"])
    damage = mock.patch.object(RouterReplay, "chosen", other_in_backward(RouterReplay.chosen))
    with damage if case.get("damage") else contextlib.nullcontext():
        for _ in range(2):  # gradients start from zero each time
            built.forward_backward(mine, loss_for("policy", rows), outputs=OUTPUTS["policy"])
    plain = built.infer({name: mine[name] for name in rows}, outputs=("log_probs",))["log_probs"]
    found = gradients(built) if isinstance(built, MegatronEngine) else fsdp_gradients(built)
    load = built.expert_load.metrics(built.reduce) if built.expert_load is not None else {}

    tell = contextlib.nullcontext() if given == "own" else told(model, experts)
    with tell:
        outputs = plain_outputs(model, rows, "policy")
        loss_for("policy", rows)(ForwardOutputs(**outputs), rows).loss.backward()
    read = [one for one, needed in zip(experts, needed_tokens(rows)[1], strict=True) if needed.any()]
    with told(model, read):
        plain_load = load_of_rows(model, rows)
    with torch.no_grad():
        untold = plain_outputs(model, rows, "policy")["log_probs"][number]
    return {
        "infer": largest(inferred["log_probs"], outputs["log_probs"].detach()[number]),
        "gradient": distance(found, named(model, lambda param: param.grad)),
        "without": largest(plain, untold),
        "moved": largest(untold, outputs["log_probs"].detach()[number]),
        "load": load,
        "plain_load": plain_load,
    }


def largest(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max()) if len(found) else 0.0


def shuffled(experts: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [one[torch.randperm(len(one), generator=generator)].roll(1, 0) for one in experts]


def own_experts(model: Any, rows: Rows) -> list[Tensor]:
    """The experts that the plain model's routers choose."""
    found = []
    for ids, mask in zip(rows["input_ids"], rows["attention_mask"].bool(), strict=True):
        with recording(model) as routed, torch.no_grad():
            model(ids[mask][None], use_cache=False)
            found.append(routed()[:-1].long().view(int(mask.sum()) - 1, len(routers_of(model)), -1))
    return found


@on_first_ranks
def rollout(path: str, dtype: str) -> dict[str, float]:
    """Samples of the hf engine beside the fsdp2 engine in float32: the largest difference of log-probs without replay, with it,
    and with the experts of other tokens; different: choices that are not those of the plain model's pass over the whole row."""
    setup = RolloutSetup(
        config=RolloutConfig(name="hf", dtype=dtype, temperature=TEMPERATURE),  # type: ignore[arg-type]
        model=ModelConfig(path=path),
        device=CPU,
        seed=0,
        max_prompt_length=PROMPT,
        max_response_length=RESPONSE,
        load_checkpoint=True,
    )
    engine = HFEngine(setup)
    engine.initialize()
    given = [torch.arange(3, 3 + length).roll(length % 3).tolist() for length in (2, 7, 5, 12, 9, 4, 12, 6)]
    requests = [GenerationRequest(prompt_ids=ids, seed=7 * row + n) for row, ids in enumerate(given) for n in range(2)]
    params = SamplingParams(max_new_tokens=RESPONSE, temperature=TEMPERATURE, stop_token_ids=(2, 5, 9, 11), routed_experts=True)
    written = engine.generate(requests, params)
    assert len({len(one.token_ids) for one in written}) > 3, "rows end one by one, and the batch is compacted"
    rows = rows_of(requests, written)
    trained = make_engine(path, "policy", "fsdp", optim=None)

    def difference(column: Tensor | None) -> float:
        more = {} if column is None else {ROUTED_EXPERTS: column}
        found = trained.infer(rows | more, outputs=("log_probs",))["log_probs"]
        return largest(found * rows["response_mask"], rows["rollout_log_probs"])

    own = column_of(own_experts(plain_model(path, "policy", torch.float32), rows))
    recorded = experts_column(requests, written)
    values, lengths = dense_rows(recorded)
    others = torch.cat([part.roll(1, 0) for part in torch.split(values, lengths.tolist())])
    return {
        "off": difference(None),
        "on": difference(recorded),
        "shuffled": difference(jagged(others, lengths)),
        "different": float((dense_rows(own)[0] != values).sum()),
    }


def rows_of(requests: Sequence[GenerationRequest], written: Sequence[Completion]) -> dict[str, Tensor]:
    """The training columns of completions."""
    ids = torch.stack([torch.tensor([0] * (PROMPT - len(one.prompt_ids)) + list(one.prompt_ids)) for one in requests])
    lengths = torch.tensor([len(one.prompt_ids) for one in requests])
    mask = (torch.arange(PROMPT) >= PROMPT - lengths[:, None]).long()
    padded = pad_completions(written, pad_id=0, with_log_probs=True, widest=lambda width: width)
    return training_columns(ids, mask, padded, 1)
