"""Episodes with tools, from the reply's text to the tokens that are trained."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rlhub.agents.trajectory import NOT_SAMPLED
from rlhub.agents.workflows.base import EpisodeData, build_workflow
from rlhub.agents.workflows.tool_agent import ELLIPSIS, ToolAgent, shortened
from rlhub.agents.workflows.turns import TurnTemplate
from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.errors import ConfigError, DataError
from rlhub.tools.call_streams import CallPart, CallStream, ReasoningPart, ReplyPart
from rlhub.tools.formats import parse_hermes
from rlhub.tools.registry import ReplyFormat
from rlhub.utils.aio.results import Reject
from tests.support.episode_parts import LOG_PROB, ScriptedEngine, episode, parts, run, tokenizer, tokens_of, written


def call(expression: str, name: str = "calculator") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'expression': expression}})}</tool_call>"


def agent(**settings: Any) -> ToolAgent:
    return ToolAgent(parts(**{"tools": ["calculator"], **settings}))


def tool_turn(*contents: str) -> str:
    answers = "".join(f"\n<tool_response>\n{content}\n</tool_response>" for content in contents)
    return f"\n<|im_start|>user{answers}<|im_end|>\n<|im_start|>assistant\n"


def test_a_call_is_answered_and_only_the_policys_tokens_are_trained() -> None:
    engine = ScriptedEngine(replies=[f"Let me see. {call('2+2')}", "It is 4."])
    found = run(agent(), engine)
    assert written(found) == [f"Let me see. {call('2+2')}<|im_end|>", tool_turn("4"), "It is 4.<|im_end|>"]
    by_policy = [position for position, mine in enumerate(found.response_mask) if mine]
    others = [position for position, mine in enumerate(found.response_mask) if not mine]
    assert {found.rollout_log_probs[position] for position in by_policy} == {LOG_PROB}
    assert {(found.rollout_log_probs[position], found.versions[position]) for position in others} == {(0.0, NOT_SAMPLED)}
    assert [found.versions[position] for position in by_policy] == sorted(found.versions[position] for position in by_policy)
    assert found.rewards is None and found.finish_reason == "stop" and found.first_version == 0
    wanted = {"num_turns": 2.0, "tool_calls": 1.0, "tool_called": 1.0, "tool_failed": 0.0, "tool_malformed": 0.0}
    assert wanted.items() <= found.metrics.items()


def test_the_second_turn_is_conditioned_on_the_very_tokens_of_the_first() -> None:
    """Tokens that no tokenizer would make of the text come back as they are."""
    odd = [*tokens_of("<tool_call>{"), *tokens_of('"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>')]
    end = tokenizer().eos_token_id
    seen: list[GenerationRequest] = []

    class Engine:
        async def agenerate(self, request: GenerationRequest, params: SamplingParams) -> Completion:
            seen.append(request)
            tokens = [*(odd if len(seen) == 1 else tokens_of("2")), end]
            return Completion(
                token_ids=tokens, log_probs=[LOG_PROB] * len(tokens), finish_reason="stop", versions=[5] * len(tokens)
            )

    found = run(agent(), Engine())
    between = tokens_of(tool_turn("2"))
    assert list(seen[1].prompt_ids) == [*seen[0].prompt_ids, *odd, end, *between]
    assert found.prompt_ids + found.response_ids == [*seen[1].prompt_ids, *tokens_of("2"), end]
    assert seen[0].seed == 77 != seen[1].seed and {request.session for request in seen} == {"3-1"}


def test_the_whole_transcript_is_what_the_chat_template_makes_of_the_conversation() -> None:
    replies = [call("2+2"), call("4*4"), "16"]
    found = run(agent(), ScriptedEngine(replies=replies))
    chat = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": replies[0]}]
    chat += [{"role": "tool", "content": "4"}, {"role": "assistant", "content": replies[1]}]
    chat += [{"role": "tool", "content": "16"}, {"role": "assistant", "content": replies[2]}]
    schemas = [tool.schema for tool in agent()._toolbox._given]  # type: ignore[union-attr]
    text = tokenizer().apply_chat_template(chat, tokenize=False, tools=schemas)
    assert tokenizer().decode(found.prompt_ids + found.response_ids) == text.rstrip("\n")


def test_tools_are_described_in_the_prompt() -> None:
    found = run(agent(), ScriptedEngine(replies=["4"]))
    text = tokenizer().decode(found.prompt_ids)
    assert '"name": "calculator"' in text and text.endswith("What is 2+2?<|im_end|>\n<|im_start|>assistant\n")
    plain = episode(raw_chat="What is 2+2?")
    assert run(agent(), ScriptedEngine(replies=["4"]), plain).prompt_ids == list(plain.prompt_ids)
    with pytest.raises(DataError, match="over data.max_prompt_length=20"):
        run(agent(limit=20), ScriptedEngine(replies=["4"]))


def test_the_samples_of_a_prompt_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    workflow, template, seen = agent(), TurnTemplate.prompt, []
    monkeypatch.setattr(TurnTemplate, "prompt", lambda self, *given: seen.append(given) or template(self, *given))

    async def all_of_them() -> list[list[int]]:
        runs = [workflow.arun_episode(ScriptedEngine(replies=["4"]), episode(question)) for question in "aaabab"]
        return [found.prompt_ids for found in await asyncio.gather(*runs) if found is not None]

    prompts = asyncio.run(all_of_them())
    assert len(seen) == 2 and prompts[0] == prompts[1] == prompts[2] == prompts[4] != prompts[3] == prompts[5]


@pytest.mark.parametrize(
    ("reply", "answer", "counted"),
    [
        ("<tool_call>{oops}</tool_call>", "not valid JSON", "tool_malformed"),
        ("<tool_call>{}", "is not closed", "tool_malformed"),
        (call("2+2", "calculater"), "did you mean 'calculator'", "tool_failed"),
        (call("2+"), "a number is missing", "tool_failed"),
        (call("9**9**9"), "too large", "tool_failed"),
        ('<tool_call>{"name": "calculator", "arguments": {}}</tool_call>', "needs the argument 'expression'", "tool_failed"),
    ],
)
def test_a_bad_call_is_answered_by_an_error_and_counted(reply: str, answer: str, counted: str) -> None:
    found = run(agent(), ScriptedEngine(replies=[reply, "4"]))
    assert "Error: " in written(found)[1] and answer in written(found)[1]
    assert found.metrics[counted] == 1.0 and found.metrics["tool_called"] == 0.0


def test_calls_of_one_turn_are_answered_together_up_to_a_number() -> None:
    found = run(agent(max_parallel_calls=2), ScriptedEngine(replies=[call("1+1") + call("1+2") + call("1+3"), "x"]))
    assert written(found)[1] == tool_turn("2", "3", "Error: 1 calls were not done: at most 2 a turn")
    assert found.metrics["tool_calls"] == 2.0


def test_long_output_is_shortened_and_cannot_end_its_turn(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(
        'def calculator(expression: str) -> str:\n    """Talk."""\n    return "<|im_end|>" + "a" * 500 + "z"\n'
    )
    settings = {"tools": [f"{tmp_path / 'talk.py'}:calculator"], "max_tool_response_length": 100}
    found = run(agent(**settings), ScriptedEngine(replies=[call("2+2"), "4"]))
    answer = written(found)[1]
    assert answer.count("<|im_end|>") == 1 and "< |im_end|>aa" in answer and ELLIPSIS in answer and "az\n</tool" in answer
    assert found.metrics["tool_truncated"] == 1.0
    assert len(answer) <= 100 + len(tool_turn(""))


@pytest.mark.parametrize("limit", [1, 5, 20, 25, 30, 99, 100])
def test_shortened_keeps_to_the_limit(limit: int) -> None:
    assert len(shortened("x" * 100, limit)) <= limit


@pytest.mark.parametrize(
    ("limits", "turns"), [({"max_assistant_turns": 1}, 1), ({"max_assistant_turns": 3}, 3), ({"max_user_turns": 1}, 2)]
)
def test_turns_are_bounded(limits: dict[str, int], turns: int) -> None:
    found = run(agent(**limits), ScriptedEngine(replies=[call("1+1")] * 9))
    assert found.metrics["num_turns"] == turns and found.response_mask[-1] == 1


@pytest.mark.parametrize("budget", [1, 30, 89, 90, 150, 160, 161, 170, 200])
def test_the_budget_is_that_of_the_whole_episode(budget: int) -> None:
    engine = ScriptedEngine(replies=[call("1+1")] * 50)
    found = run(agent(budget=budget), engine)
    assert len(found.response_ids) <= budget and found.finish_reason == "length" and found.response_mask[-1] == 1
    spent = [len(request.prompt_ids) - len(found.prompt_ids) for request in engine.requests]
    assert engine.limits == [budget - before for before in spent]


def test_a_turn_that_the_policy_did_not_close_is_closed_for_it() -> None:
    found = run(agent(), ScriptedEngine(replies=[call("1+1"), "2"], end=False))
    assert written(found)[1] == "<|im_end|>" + tool_turn("2")


def test_a_slow_tool_is_given_up_and_a_raising_one_reported(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import asyncio\n\n\nasync def slow() -> str:\n    '''Wait.'''\n    await asyncio.sleep(60)\n\n\n"
        "async def broken() -> str:\n    '''Break.'''\n    raise KeyError('gone')\n"
    )
    file = tmp_path / "slow.py"
    replies = ['<tool_call>{"name": "slow"}</tool_call><tool_call>{"name": "broken"}</tool_call>', "x"]
    found = run(agent(tools=[f"{file}:slow", f"{file}:broken"], tool_timeout_s=0.05), ScriptedEngine(replies=replies))
    assert written(found)[1] == tool_turn("Error: slow was not done after 0.05 s", "Error: KeyError: 'gone'")


def test_json_format_and_tool_file(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text("tools:\n  - name: calculator\n")
    settings = {"tool_config_path": str(tmp_path / "tools.yaml"), "format": "json", "tools": [], "enable": True}
    found = run(agent(**settings), ScriptedEngine(replies=['{"name": "calculator", "arguments": {"expression": "6/4"}}', "x"]))
    assert written(found)[1] == tool_turn("1.5")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tools": []}, "has no tools"),
        ({"tools": ["calculater"]}, "did you mean 'calculator'"),
        ({"tools": [{"name": "calculator", "setings": {}}]}, "expected a name"),
        ({"tools": ["no/such.py:f"]}, "no such file"),
        ({"tool_config_path": "nowhere.yaml"}, "nowhere.yaml"),
        ({"format": "hermess"}, "did you mean 'hermes'"),
        ({"max_tool_length": 1}, "no such knob; did you mean 'max_tool_response_length'"),
        ({"max_assistant_turns": 0}, "at least 1"),
    ],
)
def test_wrong_settings_are_errors_with_a_remedy(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LookupError if "format" in settings else ConfigError, match=message):
        agent(**settings)


def test_an_aborted_generation_rejects_and_a_partial_one_goes_on() -> None:
    class Engine:
        async def agenerate(self, request: GenerationRequest, params: SamplingParams) -> Completion:
            assert request.start == 2 and list(request.prompt_ids[-2:]) == tokens_of("It")
            tokens = [*tokens_of(" is"), tokenizer().eos_token_id]
            return Completion(token_ids=tokens, log_probs=[LOG_PROB] * 4, finish_reason="stop", versions=[2] * 4)

    start = episode()
    partial = Completion(token_ids=tokens_of("It"), log_probs=[-1.0, -1.0], finish_reason="abort", versions=[1, 1])
    data = EpisodeData(prompt_ids=start.prompt_ids, ordinal=0, sample=0, seed=1, row=start.row, partial=partial)
    found = run(agent(), Engine(), data)
    assert written(found) == ["It is<|im_end|>"] and found.versions == [1, 1, 2, 2, 2, 2]

    class Aborting:
        async def agenerate(self, request: GenerationRequest, params: SamplingParams) -> Completion:
            return partial

    with pytest.raises(Reject):
        run(agent(), Aborting())


def test_many_episodes_at_once_do_not_mix() -> None:
    workflow = agent()

    async def all_of_them() -> list[Any]:
        runs = [workflow.arun_episode(ScriptedEngine(replies=[call(f"{number}*2"), "done"]), episode()) for number in range(50)]
        return await asyncio.gather(*runs)

    for number, found in enumerate(asyncio.run(all_of_them())):
        assert written(found)[1] == tool_turn(str(number * 2))


def test_workflows_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    assert isinstance(build_workflow("tool_agent", parts(tools=["calculator"])), ToolAgent)
    file = tmp_path / "mine.py"
    file.write_text("from rlhub.agents.workflows.tool_agent import ToolAgent\nclass Mine(ToolAgent): pass\nclass No: pass\n")
    assert type(build_workflow(f"{file}:Mine", parts(tools=["calculator"]))).__name__ == "Mine"
    for name, message in ((f"{file}:Nothing", "Nothing"), ("nowhere.py:Mine", "no such file"), ("rlhub.nowhere:X", "nowhere")):
        with pytest.raises(ConfigError, match=message):
            build_workflow(name, parts())
    with pytest.raises((ConfigError, TypeError)):
        build_workflow(f"{file}:No", parts())
    with pytest.raises(LookupError, match="did you mean 'tool_agent'"):
        build_workflow("tool_agnt", parts())


SEARCH = '''
def calculator(expression: str) -> tuple[str, float, dict[str, float]]:
    """Compute."""
    return "four", 0.25, {"cost": float(len(expression))}
'''


def test_rewards_and_metrics_of_a_tool_join_the_episodes(tmp_path: Path) -> None:
    """On the tokens of the turn that called, and on top of the reward function's."""
    (tmp_path / "search.py").write_text(SEARCH)
    engine = ScriptedEngine(replies=[f"{call('2+2')}{call('2+2+2')}", "It is 4."])
    found = run(agent(tools=[f"{tmp_path / 'search.py'}:calculator"]), engine)
    assert written(found)[1] == tool_turn("four", "four")
    first_turn = found.response_mask.index(0) - 1
    assert found.rewards is None and found.added_rewards is not None
    assert {i: r for i, r in enumerate(found.added_rewards) if r} == {first_turn: 0.5}
    assert found.metrics["tool/cost"] == 4.0
    found.check()
    assert run(agent(), ScriptedEngine(replies=[call("1+1"), "2"])).added_rewards is None


class Thoughts(CallStream):
    """Reads what comes before </think> as reasoning, and numbers in brackets as calls of the calculator."""

    def add(self, text: str) -> list[ReplyPart]:
        thought, _, said = text.partition("</think>")
        parts: list[ReplyPart] = [ReasoningPart(text=thought)]
        for index, piece in enumerate(said.split("[")[1:]):
            parts += [CallPart(index=index, name="calculator"), CallPart(index=index, arguments='{"expression": ')]
            parts.append(CallPart(index=index, arguments=json.dumps(piece.partition("]")[0]) + "}"))
        return [*parts, said.partition("[")[0]]

    def end(self) -> list[ReplyPart]:
        return []


class Library:
    def __init__(self) -> None:
        self.seen: list[tuple[list[str], list[int]]] = []

    def stream(self, tools: Any, prompt_ids: Any) -> CallStream:
        self.seen.append(([tool["function"]["name"] for tool in tools], list(prompt_ids)))
        return Thoughts()


def test_a_library_s_parser_reads_calls_and_what_the_model_only_thinks_is_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    asked: list[Any] = []

    def built(*names: Any) -> ReplyFormat:
        asked.append(names[:2])
        return ReplyFormat(parser=library)

    monkeypatch.setattr("rlhub.agents.workflows.tool_agent.reply_format", built)
    engine = ScriptedEngine(replies=["[1]?</think>Let me see. [2+2][3+3]", "so</think>It is 4."])
    found = run(agent(format="vllm:any", reasoning_parser="any"), engine)
    assert asked == [("vllm:any", "any")]
    assert (
        written(found)[1] == tool_turn("4", "6") and found.metrics["tool_calls"] == 2.0 and found.metrics["tool_malformed"] == 0
    )
    assert [ids for _, ids in library.seen] == [list(request.prompt_ids) for request in engine.requests]
    assert library.seen[0][0] == ["calculator"]


def test_calls_in_rlhub_s_formats_are_found_after_thoughts(monkeypatch: pytest.MonkeyPatch) -> None:
    form = ReplyFormat(find_calls=parse_hermes, parser=Library())
    monkeypatch.setattr("rlhub.agents.workflows.tool_agent.reply_format", lambda *_: form)
    engine = ScriptedEngine(replies=[f"{call('9*9')}</think>{call('2+2')}", "4"])
    assert written(run(agent(reasoning_parser="any"), engine))[1] == tool_turn("4")
