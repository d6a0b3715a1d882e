"""One training step as the graph of a pipeline (rlhub.pipeline): what TrainingStep says as a function, with nodes that a user may
replace.

Nodes without a function of their own call what the plain step calls: methods of the workers, with the columns and parameters that
`step.py` gives them, and the driver's functions of the same SampleSource and Scorer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhub.pipeline.columns import Use
from rlhub.pipeline.executor import METRICS, Executor, Output, declared, names_of, select
from rlhub.pipeline.graph import TaskGraph
from rlhub.pipeline.nodes import Node
from rlhub.protocol import Batch, BatchRef, DataProto
from rlhub.single_controller import WorkerGroup
from rlhub.trainer.ppo.metrics import graph_metrics, mean_metrics, row_lengths
from rlhub.trainer.ppo.scoring import Scoring
from rlhub.trainer.ppo.step import (
    CORRECTION,
    ESTIMATED,
    SELECTION,
    StepParts,
    advantage_inputs,
    log_prob_inputs,
    model_inputs,
    policy_inputs,
    value_inputs,
    view,
)
from rlhub.utils.user_code import load_target

STEP = "step"


@dataclass(slots=True, kw_only=True)
class GraphStep(StepParts):
    """Trains once per call, as the graph says.  roles: the launched worker groups by role."""

    roles: Mapping[str, WorkerGroup]
    graph: TaskGraph

    def group(self, role: str) -> WorkerGroup | None:
        """Returns the workers of a node's role, wherever they live."""
        usual = {"actor": self.actor, "reference": self.reference, "critic": self.critic}
        return usual.get(role, self.roles.get(role))

    def __call__(self, step: int, prompts: Iterator[DataProto]) -> dict[str, float]:
        in_order = self.config.trainer.controller == "multi"
        result = Executor(self.graph, StepCalls(self, prompts), self.config, in_order=in_order)(step)
        trains_policy = "update_actor" in result.timings
        metrics = {"mismatch/masked_share": 0.0} if trains_policy and not self.needs.staleness else {}
        return metrics | graph_metrics(result) | self.end(result.batch)


def own_shards(graph: TaskGraph, roles: Mapping[str, WorkerGroup]) -> list[int]:
    """Returns the data-parallel sizes of the pipeline's own roles that it trains."""
    trained = [node for node in graph.nodes if node.trains in graph.roles and ":" not in node.run]
    return [getattr(roles[node.on], node.run).num_shards for node in trained]


@dataclass(slots=True)
class StepCalls:
    """Calls what the nodes name in one step.

    drawn: the step's samples as they were drawn, and their scores on the way.  dealt: the keys of the rows once they are with the
    ranks that train; a function that started before has others.
    """

    parts: GraphStep
    prompts: Iterator[DataProto]
    drawn: tuple[Batch, list[Scoring]] | None = None
    dealt: tuple[str, ...] = ()

    def start(self, node: Node, batch: Batch) -> Callable[[], Output]:
        if ":" in node.run:
            function, rows = load_target(node.run), rows_of(batch)
            return lambda: self._where_rows_are(function(rows), batch)
        own = self._own_functions().get(node.run)
        if own is not None:
            return lambda: own(node, batch)
        sent: Any = getattr(self.parts.group(node.on), node.run).submit(self._inputs(node.run, batch))
        return lambda: self._take_notice(node.run, sent.get(), len(batch))

    def _own_functions(self) -> Mapping[str, Callable[[Node, Batch], Output]]:
        """Returns the driver's functions (rlhub.pipeline.builtin.Driver) by name."""
        return {
            "publish": self._publish,
            "sample": self._sample,
            "dynamic_sampling": self._sample,
            "score": self._score,
            "balance": self._balance,
        }

    def _publish(self, node: Node, batch: Batch) -> Output:
        self.parts.source.publish()
        return DataProto(meta_info={"weights_version": self.parts.source.policy_version})

    def _sample(self, node: Node, batch: Batch) -> Output:
        """Returns the samples, with their scores where the node says that it writes them."""
        rows, scorings = self.drawn = self.parts.sample_and_score(self.prompts, batch.meta_info[STEP])
        scores = self.parts.add_scores(rows, scorings) if "scores" in (use.name for use in node.writes) else {}
        if "prompt_length" not in names_of(rows):
            rows.batch["prompt_length"] = row_lengths(rows) - rows.batch["response_length"]
        output = columns_of(rows, node.writes)
        output.meta_info[METRICS] = {**self.parts.source.metrics, **scores}
        return output

    def _score(self, node: Node, batch: Batch) -> Output:
        """Returns the scores of the samples in the order of the node's rows."""
        assert self.drawn is not None, "its inputs are samples"
        rows, scorings = self.drawn
        metrics = self.parts.add_scores(rows, scorings)
        scores = columns_of(rows.small if isinstance(rows, BatchRef) else rows, node.writes)
        scores.reorder(batch.batch["sample_index"])
        scores.meta_info[METRICS] = metrics
        return scores

    def _balance(self, node: Node, batch: Batch) -> Output:
        """Returns the rows where they train, as the plain step does."""
        rows = self.parts.deal_rows(batch, batch.meta_info[STEP])
        rows.batch["row_order"] = rows.batch["sample_index"].clone()
        if not isinstance(rows, BatchRef):
            return rows
        self.dealt = rows.keys
        return self.parts.actor.add_columns(rows)

    def _where_rows_are(self, output: Output, batch: Batch) -> Output:
        """Returns what a function of the user's own returned; columns of tokens go to the ranks that have the rows."""
        if not isinstance(batch, BatchRef) or batch.keys != self.dealt or not output:
            return output
        return self.parts.actor.add_columns(batch.select([], [], []).union(output))

    def _inputs(self, method: str, batch: Batch) -> Batch:
        """Returns what a method of the workers reads, with its parameters."""
        parts, needs = self.parts, self.parts.needs
        match method:
            case "compute_log_prob":
                return log_prob_inputs(batch, needs)
            case "compute_ref_log_prob" | "compute_values":
                return model_inputs(batch)
            case "compute_advantages":
                return advantage_inputs(batch, needs, parts.kl_controller.value)
            case "measure_batch":
                return advantage_inputs(batch, needs, parts.kl_controller.value, ESTIMATED)
            case "rollout_correction":
                return view(batch, CORRECTION)
            case "select_tokens":
                return view(batch, SELECTION, step=batch.meta_info[STEP])
            case "update_actor":
                return policy_inputs(batch, needs)
            case "update_critic":
                return value_inputs(batch)
        return batch

    def _take_notice(self, method: str, output: Batch, num_rows: int) -> Batch:
        """Checks the mismatch of the policies as soon as it is measured: with the advantages, or else in the update."""
        metrics = mean_metrics(output.meta_info.get(METRICS, {}))
        if method in ("compute_advantages", "measure_batch"):
            self.parts.take_notice(metrics, num_rows)
        elif method == "update_actor" and not self.parts.needs.old_log_probs:
            self.parts.mismatch.check(metrics)
        return output


def columns_of(rows: Batch, uses: tuple[Use, ...]) -> Batch:
    """Returns the rows with the declared columns only."""
    return select(rows, declared(uses, names_of(rows)), declared(uses, [*rows.meta_info]))


def rows_of(batch: Batch) -> DataProto:
    """Returns the rows with all columns, as a function of the user's own gets them; columns of tokens are fetched and counted."""
    if isinstance(batch, BatchRef):
        return batch.fetch_all() if batch.columns else batch.small
    return batch
