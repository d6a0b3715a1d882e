"""The load of experts against counting by hand."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen3MoeConfig

from rlhub.engines.training.expert_load import ExpertLoad, load_of, of_indices, of_map

EXPERTS, CPU = 4, torch.device("cpu")


class Router(nn.Module):
    """Chooses what it is given."""

    num_experts = EXPERTS

    def forward(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(()), chosen


def alone(values: Tensor, op: str = "sum", *, every_rank: bool = False) -> Tensor:
    return values.clone()


def by_hand(layers: list[list[int]]) -> dict[str, float]:
    most, entropy, idle = 0.0, 0.0, 0.0
    for chosen in layers:
        counts = Counter(chosen)
        shares = [counts[expert] / len(chosen) for expert in range(EXPERTS)]
        most += max(shares) * EXPERTS
        entropy -= sum(share * math.log(share) for share in shares if share) / math.log(EXPERTS)
        idle += sum(not share for share in shares) / EXPERTS
    return {
        "actor/expert_load_max": most / len(layers),
        "actor/expert_load_entropy": entropy / len(layers),
        "actor/experts_idle": idle / len(layers),
    }


def test_metrics_are_means_over_the_layers() -> None:
    routers = [Router(), Router()]
    load = ExpertLoad(dict(enumerate(routers)), (2, EXPERTS), of_indices, CPU)
    layers = [[0, 1, 1, 2, 1, 3, 3, 0], [2, 2, 2, 2, 2, 0, 0, 2]]
    for router, chosen in zip(routers, layers, strict=True):
        for part in (chosen[:4], chosen[4:]):  # two micro-batches
            router(torch.tensor(part).view(2, 2))
    assert load.metrics(alone) == pytest.approx(by_hand(layers))
    for router in routers:
        router(torch.arange(EXPERTS)[None])
    even = load.metrics(alone)
    assert even == pytest.approx({"actor/expert_load_max": 1.0, "actor/expert_load_entropy": 1.0, "actor/experts_idle": 0.0})


def test_passes_without_gradients_do_not_count() -> None:
    router = Router()
    load = ExpertLoad({0: router}, (1, EXPERTS), of_indices, CPU)
    with torch.no_grad():
        router(torch.tensor([[0, 1]]))
    assert load.take().sum() == 0


def test_ranks_have_layers_and_tokens_of_their_own() -> None:
    """Pipeline stages have different layers, one of dense layers alone has none of the routers; sequence parallel ranks have
    parts of the tokens."""
    layers = [[0, 1, 1, 2, 1, 3, 3, 0], [2, 2, 2, 2, 2, 0, 0, 2]]  # the second and the third of three
    ranks = [(1, layers[0][:3]), (1, layers[0][3:]), (2, layers[1][:4]), (2, layers[1][4:]), (None, [])]
    loads = []
    for layer, chosen in ranks:
        router = Router()
        loads.append(ExpertLoad({} if layer is None else {layer: router}, (3, EXPERTS), of_indices, CPU))
        router(torch.tensor(chosen, dtype=torch.long))
    total = torch.stack([load.take() for load in loads]).sum(0)

    def of_all(values: Tensor, op: str = "sum", *, every_rank: bool = False) -> Tensor:
        assert every_rank and not values.any()
        return total

    for load in loads:
        assert load.metrics(of_all) == pytest.approx(by_hand(layers))


def test_a_map_counts_as_indices_do() -> None:
    chosen = torch.tensor([[0, 2], [1, 2], [2, 3]])
    mask = torch.zeros(3, EXPERTS, dtype=torch.bool).scatter_(1, chosen, True)
    assert torch.equal(of_map((mask.float(), mask), EXPERTS), of_indices((mask, chosen), EXPERTS))


@pytest.mark.parametrize("config_class", [Qwen2MoeConfig, Qwen3MoeConfig])
def test_the_routers_of_a_model(config_class: type[Qwen2MoeConfig | Qwen3MoeConfig]) -> None:
    """Each token is counted for as many experts as it takes, in each layer; those are the ones with the largest logits."""
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_hidden_layers": 3}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**sizes, **experts))
    load = load_of(model, CPU)
    assert load is not None
    answer = model(torch.arange(10)[None], use_cache=False, output_router_logits=True)
    expected = [torch.bincount(logits.topk(2).indices.flatten(), minlength=EXPERTS) for logits in answer.router_logits]
    assert torch.equal(load.take(), torch.stack(expected).double())
