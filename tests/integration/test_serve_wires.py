"""main_serve over vLLM, by the clients of OpenAI and Anthropic: its wires, what shapes its answers, and its numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.chat_model import END
from tests.support.serving import Server, serving
from tests.support.tiny_models import sequence_log_probs

VLLM = ("rollout.name=vllm", "rollout.max_model_len=400", "rollout.max_num_seqs=8", "server.tool_format=vllm:hermes")
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"enum": [3, 4]}},
    "required": ["sum"],
    "additionalProperties": False,
}
QUESTION = {"role": "user", "content": "2+2?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("served"), *VLLM) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.address}/v1", api_key=server.key, max_retries=0)


def test_answers_have_the_form_that_is_asked_for(server: Server, client: OpenAI) -> None:
    """A random model would never write it, at temperature 1, and would fill it with the whitespace that JSON allows anywhere."""
    pytest.importorskip("lmformatenforcer", reason="vLLM's check of a JSON schema imports it")
    form: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
    tokenizer = AutoTokenizer.from_pretrained(server.model)
    compact: Any = {"logit_bias": {str(tokenizer.encode(white, add_special_tokens=False)[0]): -100 for white in " \n\r\t"}}
    answer = client.chat.completions.create(
        model="policy", messages=[QUESTION], response_format=form, n=4, max_tokens=60, extra_body=compact
    )
    said = [json.loads(choice.message.content or "") for choice in answer.choices]
    assert all(made in ({"sum": 3}, {"sum": 4}) for made in said), said
    named: Any = {"format": {"type": "json_schema", "name": "sum", "schema": SCHEMA}}
    responded = client.responses.create(model="policy", input="2+2?", text=named, extra_body=compact)
    assert json.loads(responded.output_text)["sum"] in (3, 4)
    with pytest.raises(openai.BadRequestError):
        bad: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"type": "nothing"}}}
        client.chat.completions.create(model="policy", messages=[QUESTION], response_format=bad)
    assert client.chat.completions.create(model="policy", messages=[QUESTION], max_tokens=3).usage, "the engine goes on"


def test_biases_and_smallest_lengths_are_followed(server: Server, client: OpenAI) -> None:
    tokenizer = AutoTokenizer.from_pretrained(server.model)
    letter, end = tokenizer.encode("z", add_special_tokens=False)[0], tokenizer.convert_tokens_to_ids(END)
    given: Any = {"model": "policy", "messages": [QUESTION], "temperature": 0.0, "max_tokens": 12}
    answer = client.chat.completions.create(**given, logit_bias={str(letter): 100})
    assert answer.choices[0].message.content == "z" * 12
    lengths = []
    for least in (0, 7):
        ended = client.chat.completions.create(**given, logit_bias={str(end): 100}, extra_body={"min_tokens": least})
        assert ended.usage is not None
        lengths.append(ended.usage.completion_tokens)
    assert lengths == [1, 8]
    penalised = client.chat.completions.create(**given, logit_bias={str(letter): 3}, frequency_penalty=2.0)
    assert len(set(penalised.choices[0].message.content or "")) > 1


def test_likeliest_tokens_and_prompts_change_no_answer(server: Server, client: OpenAI) -> None:
    given: Any = {"model": "policy", "messages": [QUESTION], "seed": 3, "max_tokens": 8, "logprobs": True}
    plain, ranked = (client.chat.completions.create(**given, **more) for more in ({}, {"top_logprobs": 20}))
    streamed = [
        choice for chunk in client.chat.completions.create(**given, top_logprobs=20, stream=True) for choice in chunk.choices
    ]
    whole = ranked.choices[0].logprobs.content
    assert [place.token for place in whole] == [place.token for place in plain.choices[0].logprobs.content]
    assert [place.logprob for place in whole] == pytest.approx([place.logprob for place in plain.choices[0].logprobs.content])
    parts = [place for choice in streamed if choice.logprobs for place in choice.logprobs.content]
    assert [place.token for place in parts] == [place.token for place in whole]
    for places in (whole, parts):
        for place in places:
            values = [top.logprob for top in place.top_logprobs]
            assert len(values) == 20 and values == sorted(values, reverse=True)
            shown = [top.logprob for top in place.top_logprobs if top.token == place.token]
            assert place.logprob < values[-1] + 1e-5 or any(value == pytest.approx(place.logprob) for value in shown)
    tokenizer = AutoTokenizer.from_pretrained(server.model)
    ids = tokenizer("The sum of 2 and 2", add_special_tokens=False)["input_ids"]
    expected = sequence_log_probs(AutoModelForCausalLM.from_pretrained(server.model), ids[:1], ids[1:], 1.0)
    for more in ({"max_tokens": 0}, {"max_tokens": 2}, {"max_tokens": 2}):
        echoed = client.completions.create(model="policy", prompt=ids, echo=True, logprobs=3, **more).choices[0]
        assert echoed.text.startswith("The sum of 2 and 2")
        assert echoed.logprobs.token_logprobs[0] is None
        assert echoed.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-4)
        assert 0 <= len(echoed.logprobs.tokens) - len(ids) <= more["max_tokens"]
        assert all(len(top) >= 1 for top in echoed.logprobs.top_logprobs[1:])


def test_both_clients_stream_and_the_numbers_show_it(server: Server, client: OpenAI) -> None:
    other = Anthropic(base_url=server.address, api_key=server.key, max_retries=0)
    with other.messages.stream(model="policy", max_tokens=5, messages=[{"role": "user", "content": "2+2?"}]) as events:
        message = events.get_final_message()
    assert message.usage.output_tokens <= 5 and message.stop_reason in ("max_tokens", "end_turn")
    kinds = [event.type for event in client.responses.create(model="policy", input="2+2?", max_output_tokens=5, stream=True)]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    numbers = client._client.get(f"{server.address}/metrics", headers={"Authorization": f"Bearer {server.admin_key}"})
    assert numbers.status_code == 200, numbers.text
    found = dict(line.rsplit(" ", 1) for line in numbers.text.splitlines() if not line.startswith("#"))
    assert found['rlhub_requests_total{status="200",wire="messages"}'] == "1.0"
    assert found["rlhub_weights_version"] == "0.0" and found["rlhub_engine_requests"] == "0.0"
    paused = client._client.post(f"{server.address}/admin/pause", headers={"Authorization": f"Bearer {server.key}"})
    assert paused.status_code == 401, "the clients' key changes nothing of the service"
