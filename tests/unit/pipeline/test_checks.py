"""What is wrong with a pipeline is named before anything runs: node, fault and remedy, all of it together."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import ConfigError
from rlhub.pipeline.builtin import MODEL, dapo, dpo, ppo, sft
from rlhub.pipeline.checks import ROLES, methods_of
from rlhub.pipeline.graph import Pipeline
from rlhub.registry import load_object
from rlhub.single_controller.decorator import registered_methods
from rlhub.workers.roles import ActorRolloutRefWorker, DPOWorker
from tests.support.pipelines import SomeNeeds

ROOT = Path(__file__).resolve().parents[3]


def step(**needs: bool) -> Pipeline:
    return ppo(None, SomeNeeds(**needs))


def plant(*edits: Callable[[Pipeline], object], **needs: bool) -> list[str]:
    pipeline = step(**needs)
    for edit in edits:
        edit(pipeline)
    return pipeline.problems(PPOConfig())


SHAPE = "rlhub.utils.balance:partition"
"""Any function that there is."""

FAULTS: dict[str, tuple[Callable[[Pipeline], object], str]] = {
    "a misspelt column is read": (
        lambda p: p.replace("score", "score", reads="respones", writes="scores valid token_level_scores"),
        "node 'score' reads 'respones', which is no column; did you mean 'responses'?",
    ),
    "a misspelt column is written": (
        lambda p: p.replace("select_tokens", "select_tokens", reads="loss_mask", writes="selectd"),
        "node 'select_tokens' writes 'selectd', which is no column; did you mean 'selected'?",
    ),
    "a column has no writer": (
        lambda p: p.remove("compute_advantages"),
        "node 'update_critic' reads 'learn_mask', which no node writes (usually 'compute_advantages' does)",
    ),
    "a column has two writers": (
        lambda p: p.add("mask_truncated", run=SHAPE, reads="finish_reason", writes="learn_mask", after="update_actor"),
        "column 'learn_mask' is written by 'compute_advantages' and 'mask_truncated'; no column is written twice",
    ),
    "nodes wait in a circle": (
        lambda p: p.replace("publish", "publish", on="actor", reads="step", writes="weights_version", after="update_actor"),
        "nodes wait for each other in a circle: ",
    ),
    "an unknown role": (
        lambda p: p.replace("compute_values", "compute_values", on="critc", reads=MODEL, writes="values"),
        "node 'compute_values' is on role 'critc', which there is not; did you mean 'critic'?",
    ),
    "an output that nobody reads": (
        lambda p: p.insert("style", below="score", run=SHAPE, reads="responses", writes="style:float32(rows)"),
        "node 'style' is of no use: no node reads what it writes (style); remove it",
    ),
    "a column of another dtype": (
        lambda p: p.insert("look", below="score", run=SHAPE, reads="response_mask:int64"),
        "node 'look' reads 'response_mask:int64', but response_mask is bool(rows response)",
    ),
    "a column of other dims": (
        lambda p: p.insert("look", below="score", run=SHAPE, reads="scores:float32(rows response)"),
        "node 'look' reads 'scores:float32(rows response)', but scores is float32(rows)",
    ),
    "no dtype": (
        lambda p: p.insert("look", below="score", run=SHAPE, reads="scores", writes="shaped:flaot32(rows)"),
        "node 'look' writes 'shaped' as 'flaot32', which is no dtype; did you mean 'float32'?",
    ),
    "a node after the one that needs it": (
        lambda p: (
            p.remove("score"),
            p.insert("score", below="compute_advantages", reads="responses", writes="scores valid reward/*?"),
        ),
        "node 'compute_advantages' needs 'score' (scores valid reward/*), which stands below it; put 'compute_advantages' below",
    ),
    "a name twice": (
        lambda p: p.insert("score", below="score", run=SHAPE, reads="responses", writes="rm_scores"),
        "node 'score' is declared twice; rename one",
    ),
    "a condition on an unknown setting": (
        lambda p: p.insert("look", below="score", run=SHAPE, reads="scores", when="step > trainer.critic_warmpu"),
        "node 'look' has when='step > trainer.critic_warmpu', which names 'trainer.critic_warmpu', which is no setting; "
        "did you mean 'trainer.critic_warmup'?",
    ),
    "a condition that could be anything": (
        lambda p: p.insert("look", below="score", run=SHAPE, reads="scores", when="__import__('os').system('true')"),
        "node 'look' has when=\"__import__('os').system('true')\", which may have numbers, settings",
    ),
    "a function that there is not": (
        lambda p: p.insert("look", below="score", run="rlhub.utils.balance:partitoin", reads="scores"),
        "node 'look' runs rlhub.utils.balance:partitoin: not defined in",
    ),
    "a file that there is not": (
        lambda p: p.insert("look", below="score", run="no/such/file.py:look", reads="scores"),
        "node 'look' runs no/such/file.py:look: no such file",
    ),
    "a worker method that there is not": (
        lambda p: p.replace("compute_values", "compute_value", on="critic", reads=MODEL, writes="values"),
        "node 'compute_value' runs 'compute_value', which is no method of critic or the driver; did you mean 'compute_values'?",
    ),
    "trains without a role": (
        lambda p: p.replace("update_critic", "update_critic", run=SHAPE, reads="returns", trains="critic"),
        "node 'update_critic' trains 'critic' and is on no role: give on='critic'",
    ),
    "trains another role": (
        lambda p: p.replace("update_critic", "update_critic", on="critic", reads="returns", trains="actor"),
        "node 'update_critic' trains 'actor' but is on 'critic'",
    ),
    "gathers tokens": (
        lambda p: p.insert("look", below="score", run=SHAPE, reads="responses scores", gathers="scores responses"),
        "node 'look' gathers 'responses', which is int32(rows response): only columns of one number a row may be gathered",
    ),
    "gathers what it does not read": (
        lambda p: p.insert("look", below="score", run=SHAPE, reads="scores", gathers="score"),
        "node 'look' gathers 'score', which it does not read; did you mean 'scores'?",
    ),
    "a column of a node that runs at some steps only": (
        lambda p: p.add("look", run=SHAPE, reads="loss_mask"),
        "node 'look' reads 'loss_mask', which 'rollout_correction' writes only when step > trainer.critic_warmup; if it can do",
    ),
    "old weights below the update": (
        lambda p: p.add("log_probs_again", run="compute_log_prob", on="actor", reads=MODEL),
        "node 'log_probs_again' uses the weights of actor and stands below 'update_actor', which trains them: put it above, or "
        "say after='update_actor'",
    ),
    "a field that there is not": (
        lambda p: p.add("look", run=SHAPE, read="scores"),  # type: ignore[call-arg]
        "node 'look' has no field 'read'; did you mean 'reads'?",
    ),
    "an edit of a node that there is not": (
        lambda p: p.remove("compute_ref_log_probs"),
        "remove('compute_ref_log_probs'): no node 'compute_ref_log_probs'; did you mean 'compute_ref_log_prob'?",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str) -> None:
    edit, message = FAULTS[fault]
    problems = plant(edit)
    assert any(problem.startswith(message) for problem in problems), problems


def test_a_column_of_a_node_that_does_not_run_here() -> None:
    problems = plant(lambda p: p.add("look", run=SHAPE, reads="values"), values=False)
    text = (
        "reads 'values', which only 'compute_values' writes, and that does not run here; if it can do without, it reads 'values?'"
    )
    assert problems == [f"node 'look' {text}"]


INDEPENDENT = [
    *("a misspelt column is read", "a misspelt column is written", "a column has two writers", "an unknown role"),
    *("an output that nobody reads", "a condition on an unknown setting", "a field that there is not"),
]


def test_faults_are_named_together() -> None:
    pipeline = step()
    for fault in INDEPENDENT:
        FAULTS[fault][0](pipeline)
    with pytest.raises(ConfigError) as caught:
        pipeline.build(PPOConfig())
    for fault in INDEPENDENT:
        assert f"pipeline 'ppo': {FAULTS[fault][1]}" in str(caught.value)


def test_checks_load_no_torch_and_take_little_time(tmp_path: Path) -> None:
    """Fifteen faults and more, in a process of its own: at most 1 s of CPU, of which a machine that does nothing else takes an
    eighth, and nothing heavy loaded."""
    program = tmp_path / "check.py"
    program.write_text(
        "import sys, time\n"
        "from types import SimpleNamespace\n"
        "import rlhub.config.sections.ppo\n"
        "start = time.process_time()\n"
        "from rlhub.pipeline.load import build_pipeline, problems_of\n"
        "names = ('values', 'own_values', 'reference', 'old_log_probs', 'correction', 'selection')\n"
        "needs = SimpleNamespace(**{name: name != 'own_values' for name in names})\n"
        f"build = lambda: build_pipeline('{tmp_path}/mine.py:mine', rlhub.config.sections.ppo.PPOConfig(), needs)\n"
        "problems = problems_of(build)\n"
        "seconds = time.process_time() - start\n"
        "assert len(problems) >= 15, problems\n"
        "assert seconds <= 1.0, seconds\n"
        "assert not {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)\n"
    )
    (tmp_path / "mine.py").write_text(
        "from rlhub.pipeline.builtin import ppo\n"
        "def mine(config, needs):\n"
        "    step = ppo(config, needs)\n"
        "    for index in range(15):\n"
        "        step.add(f'fault{index}', run='no_such_function', reads='respones')\n"
        "    return step\n"
    )
    done = subprocess.run([sys.executable, str(program)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


# --- an example that is published elsewhere ----------------------------------------------------------------------------------


def embodied(*, faulty: bool) -> Pipeline:
    """An embodied pipeline; the faulty one decodes actions after training on them, and needs a text encoder that there is not."""
    pipeline = Pipeline("embodied")
    pipeline.add("rollout", run="sample", on="rollout", reads="step", writes="responses response_mask")

    def decode() -> None:
        after = {"after": ["text_encoding", "actor_train"]} if faulty else {}
        pipeline.add("action_decoding", run=SHAPE, reads="responses", writes="actions", **after)  # type: ignore[arg-type]

    if not faulty:
        decode()
    pipeline.add("actor_train", run="update_actor", on="actor", reads="actions response_mask", trains="actor")
    if faulty:
        decode()
    return pipeline


def test_the_published_faulty_example_is_refused() -> None:
    assert embodied(faulty=False).problems() == []
    problems = embodied(faulty=True).problems()
    assert problems[0].startswith("node 'action_decoding' comes after 'text_encoding', which is no other node")
    assert problems[1] == "nodes wait for each other in a circle: actor_train -> action_decoding -> actor_train"
    below = embodied(faulty=False)
    below.nodes.reverse()
    assert any(
        problem == "node 'actor_train' needs 'action_decoding' (actions), which stands below it; put 'actor_train' below "
        "'action_decoding'"
        for problem in below.problems()
    )


# --- the built-in ones, and what the checks read of the sources ---------------------------------------------------------------


@pytest.mark.parametrize("function", [ppo, dapo, sft, dpo])
@pytest.mark.parametrize("every", [True, False])
def test_built_in_pipelines_have_no_problem(function: Callable[..., Pipeline], every: bool) -> None:
    needs = SomeNeeds(values=every, reference=every, old_log_probs=every, selection=every)
    assert function(None, needs).problems(PPOConfig()) == []


@pytest.mark.parametrize("name", sorted(set(ROLES) - {"driver"}))
def test_methods_are_read_from_the_source(name: str) -> None:
    assert methods_of(ROLES[name]) == set(registered_methods(load_object(ROLES[name])))


@pytest.mark.parametrize("worker", [ActorRolloutRefWorker, DPOWorker])
def test_methods_of_base_classes_in_other_files_are_found(worker: type) -> None:
    assert methods_of(f"{worker.__module__}:{worker.__name__}") == set(registered_methods(worker))


def test_roles_of_a_pipelines_own() -> None:
    """Two policies with roles of their own, trained by turns."""
    pipeline = Pipeline("two", roles={"coder": "rlhub.workers.actor:ActorWorker", "tester": "rlhub.workers.actor:ActorWorker"})
    pipeline.add("next_batch", writes="input_ids attention_mask response_mask")
    for role in ("coder", "tester"):
        log_probs = f"{role}_log_probs:float32(rows response)"
        pipeline.add(f"{role}_pass", run="compute_log_prob", on=role, reads=MODEL, writes=log_probs)
    turns = ("step % 2 == 1", "step % 2 == 0")
    for role, turn in zip(("coder", "tester"), turns, strict=True):
        reads = [MODEL, "coder_log_probs tester_log_probs"]
        pipeline.add(f"train_{role}", run="update_actor", on=role, reads=reads, trains=role, when=turn)
    graph = pipeline.build()
    assert {(edge.source, edge.target) for edge in graph.edges if edge.trains} == {
        ("coder_pass", "train_coder"),
        ("tester_pass", "train_tester"),
    }
