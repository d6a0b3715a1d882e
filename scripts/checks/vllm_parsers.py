"""Prints for each of vLLM's tool-call and reasoning parsers whether whole and streamed answers are read alike.

    python scripts/checks/vllm_parsers.py [--list] [--streams] [NAME ...]

The exit status is 1 where a parser neither agrees nor refuses.  Each parser is built with a tiny tokenizer that has the format's
own tokens, and reads a sample of its format: whole, and token by token as the endpoint streams it.  "refuses" is a parser that
does not take the tokenizer, or needs what the environment does not have; the reason is vLLM's own.  Formats: the docstrings and
constants of vllm/tool_parsers, vllm/parser and vllm/reasoning.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NAME, KEY, CITIES = "weather", "city", ("SF", "Oslo")
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {KEY: {"type": "string"}}, "required": [KEY]},
    },
}
TAG = re.compile(r"<[|｜/]*[\w:|｜▁]+[|｜]?>|\[[A-Z_]+\]|｜DSML｜|\]<\]minimax\[>\[")
THOUGHT, REPLY = "I think so.", "It rains."


def objects(argument: str = "arguments") -> list[str]:
    """The calls as JSON objects."""
    return [json.dumps({"name": NAME, argument: {KEY: city}}) for city in CITIES]


def each(form: str, cities: Sequence[str] = CITIES, joined: str = "") -> str:
    """A text for each call, with $c for the city and $i for the call's number."""
    return joined.join(form.replace("$c", city).replace("$i", str(index)) for index, city in enumerate(cities))


ARRAY = "[" + ", ".join(objects()) + "]"
HERMES = "\n".join(f"<tool_call>\n{item}\n</tool_call>" for item in objects())
QWEN_XML = each("<tool_call>\n<function=weather>\n<parameter=city>\n$c\n</parameter>\n</function>\n</tool_call>", joined="\n")
GLM = each("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>$c</arg_value>\n</tool_call>")
PYTHONIC = "[" + each('weather(city="$c")', joined=", ") + "]"
INVOKE = each('<invoke name="weather">\n<parameter name="city">$c</parameter>\n</invoke>\n')
DSML = each(
    '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">$c</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
)
MINIMAX3 = each(']<]minimax[>[<invoke name="weather">]<]minimax[>[<city>$c]<]minimax[>[</city>]<]minimax[>[</invoke>\n')
HY = each("<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>$c</arg_value>\n</tool_call>\n")
HY4 = each("<tool_call>weather<arg_key>city</arg_key><arg_value>$c</arg_value></tool_call>")
IFM = each("<ifm|tool_call>weather<ifm|arg_key>city</ifm|arg_key><ifm|arg_value>$c</ifm|arg_value></ifm|tool_call>")
PLAMO = each(
    "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>weather<|plamo:end_tool_name:plamo|>"
    '<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{"city": "$c"}<|plamo:end_tool_arguments:plamo|>'
    "<|plamo:end_tool_request:plamo|>"
)
STEP3 = each(
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">'
    '<steptml:parameter name="city">$c</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
)
XTML = each(
    '<|open|>call tool="weather" index="$i"<|sep|><|open|>argument key="city" type="string"<|sep|>$c<|close|>argument<|sep|>'
    "<|close|>call<|sep|>"
)
MUSE = each(
    '<|start|>assistant to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n'
    '<atem:parameter name="city">$c</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>'
)
CALLS: dict[str, str] = {
    "apertus": "<|tools_prefix|>[" + each('{"weather": {"city": "$c"}}', joined=", ") + "]<|tools_suffix|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>"
    + each('<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "$c"}\n```<｜tool▁call▁end｜>', joined="\n")
    + "<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    + each('<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "$c"}<｜tool▁call▁end｜>')
    + "<｜tool▁calls▁end｜>",
    "deepseek_v32": f"<｜DSML｜function_calls>\n{DSML}</｜DSML｜function_calls>",
    "deepseek_v4": f"<｜DSML｜tool_calls>\n{DSML}</｜DSML｜tool_calls>",
    "deepseek_v41": f"<｜DSML｜ calls>\n{DSML.replace('｜DSML｜', '｜DSML｜ ')}</｜DSML｜ calls>",
    "dots": f"<dots_function_call>\n{INVOKE}</dots_function_call>",
    "ernie45": HERMES,
    "functiongemma": each("<start_function_call>call:weather{city:<escape>$c<escape>}<end_function_call>"),
    "gemma4": each('<|tool_call>call:weather{city:<|"|>$c<|"|>}<tool_call|>'),
    "gigachat3": f"<|function_call|>{objects()[0]}",
    "glm45": GLM,
    "glm47": GLM.replace("\n", ""),
    "granite": f"<tool_call>{ARRAY}",
    "granite-20b-fc": "\n".join(f"<function_call> {item}" for item in objects()),
    "granite4": HERMES,
    "hermes": HERMES,
    "hunyuan_a13b": f"<tool_calls>{ARRAY}</tool_calls>",
    "hy_v3": f"<tool_calls>\n{HY}</tool_calls>",
    "hy_v4": f"<tool_calls>\n{HY4}</tool_calls>",
    "inkling": each('<|message_model|><|content_invoke_tool_json|>{"name":"weather","args":{"city":"$c"}}<|end_message|>'),
    "internlm": f"<|action_start|><|plugin|>{objects('parameters')[0]}<|action_end|>",
    "jamba": f"<tool_calls>{ARRAY}</tool_calls>",
    "k2_horizon": f"<ifm|tool_calls>{IFM}</ifm|tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|>"
    + each('<|tool_call_begin|>functions.weather:$i<|tool_call_argument_begin|>{"city": "$c"}<|tool_call_end|>')
    + "<|tool_calls_section_end|>",
    "kimi_k3": f"<|open|>tools<|sep|>{XTML}<|close|>tools<|sep|>",
    "lfm2": f"<|tool_call_start|>{PYTHONIC}<|tool_call_end|>",
    "ling3": GLM.replace("\n", ""),
    "llama3_json": "; ".join(objects("parameters")),
    "llama4_json": "; ".join(objects("parameters")),
    "llama4_pythonic": PYTHONIC,
    "longcat": "\n".join(f"<longcat_tool_call>\n{item}\n</longcat_tool_call>" for item in objects()),
    "mimo": QWEN_XML.replace("city>\n", "city>").replace("\n</parameter", "</parameter"),
    "minicpm5": each('<function name="weather"><param name="city">$c</param></function>', joined="\n"),
    "minimax_m2": f"<minimax:tool_call>\n{INVOKE}</minimax:tool_call>",
    "minimax_m3": f"]<]minimax[>[<tool_call>\n{MINIMAX3}]<]minimax[>[</tool_call>",
    "mistral": f"[TOOL_CALLS]{ARRAY}",
    "muse_glimmer": MUSE,
    "olmo3": "<function_calls>" + each('weather(city="$c")', joined="\n") + "</function_calls>",
    "openai": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "SF"}<|call|>',
    "phi4_mini_json": f"functools{ARRAY}",
    "plamo3": f"<|plamo:begin_tool_requests:plamo|>{PLAMO}<|plamo:end_tool_requests:plamo|>",
    "poolside_v1": GLM,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN_XML,
    "qwen3_json": HERMES,
    "qwen3_xml": QWEN_XML,
    "seed_oss": QWEN_XML.replace("tool_call>", "seed:tool_call>").replace("<seed:", "<seed:"),
    "step3": f"<｜tool_calls_begin｜>{STEP3}<｜tool_calls_end｜>",
    "step3p5": QWEN_XML,
    "xlam": ARRAY,
}
"""Tool parser -> a reply with its calls: one for SF, and where the format allows several, one for Oslo."""
CHANNELS = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{REPLY}"
THOUGHTS: dict[str, str] = {
    "gemma4": f"<|channel>thought\n{THOUGHT}<channel|>{REPLY}",
    "granite": f"Here is my thought process: {THOUGHT} Here is my response: {REPLY}",
    "hunyuan_a13b": f"<think>\n{THOUGHT}\n</think>\n<answer>\n{REPLY}\n</answer>",
    "inkling": f"<|message_model|><|content_thinking|>{THOUGHT}<|end_message|><|message_model|><|content_text|>{REPLY}",
    "k2_horizon": f"<ifm|think>{THOUGHT}</ifm|think>{REPLY}",
    "kimi_k3": f"<|open|>think<|sep|>{THOUGHT}<|close|>think<|sep|><|open|>response<|sep|>{REPLY}<|close|>response<|sep|>",
    "minimax_m2_append_think": f"{THOUGHT}</think>{REPLY}",
    "minimax_m3": f"<mm:think>{THOUGHT}</mm:think>{REPLY}",
    "mistral": f"[THINK]{THOUGHT}[/THINK]{REPLY}",
    "muse_glimmer": f"<|start|>assistant to=self<|message|>{THOUGHT}<|eom|><|start|>assistant to=user<|message|>{REPLY}<|eot|>",
    "openai_gptoss": CHANNELS,
    "plamo3": f"<|plamo:begin_think:plamo|>{THOUGHT}<|plamo:end_think:plamo|>{REPLY}",
    "seed_oss": f"<seed:think>{THOUGHT}</seed:think>{REPLY}",
    "step3": f"{THOUGHT}</think>{REPLY}",
}
"""Reasoning parser -> a reply with a thought; the others read <think>...</think>."""
THINK = f"<think>{THOUGHT}</think>{REPLY}"
READ = {"minimax_m2_append_think": ("", f"<think>{THOUGHT}</think>{REPLY}")}
"""Reasoning parser -> the (reasoning, text) that it reads in its sample, where it leaves the thought in the text."""
EXTRA = {
    "llama3_json": ["<|python_tag|>"],
    "llama4_json": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]"],
    "olmo3": ["Ġ</", "</", "think", ">"],
    "poolside_v1": ["<assistant>", "</assistant>"],
}
"""Parser -> the tokens that it needs besides those of its sample."""
KWARGS = {"thinking": True, "enable_thinking": True, "reasoning_effort": "high"}
"""Variables of the chat templates of models that think on demand."""


@dataclass(slots=True, kw_only=True)
class Row:
    """A parser's line in the table.  verdict: same, differs or refuses."""

    kind: str
    name: str
    verdict: str
    why: str = ""


def tiny_tokenizer(sample: str, extra: Sequence[str] = ()) -> Any:
    """A tokenizer of bytes, and of the format's tokens."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tags = {*TAG.findall(sample), *extra, "<think>", "</think>"}
    tags |= {tag.replace("<", "</", 1) for tag in tags if re.fullmatch(r"<[\w:|]+>", tag)}
    inner.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in sorted(tags)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|tiny_end|>", clean_up_tokenization_spaces=False)


def parts_of(stream: Any, sample: str, tokenizer: Any, *, whole: bool) -> tuple[str, str, list[Any]]:
    """Returns (reasoning, text, calls) of a reply."""
    from rlhub.tools.call_streams import CallPart, ReasoningPart

    if whole:
        parts = stream.whole(sample)
    else:
        pieces = [tokenizer.decode([token]) for token in tokenizer.encode(sample, add_special_tokens=False)]
        parts = [part for piece in pieces for part in stream.add(piece)] + stream.end()
    calls: list[list[str]] = []
    for part in (part for part in parts if isinstance(part, CallPart)):
        if part.name is not None:
            calls.append([part.name, ""])
        calls[part.index][1] += part.arguments
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    text = "".join(part for part in parts if isinstance(part, str))
    return reasoning.strip(), text.strip(), [(name, json.loads(arguments)) for name, arguments in calls]


def row_of(kind: str, name: str, sample: str) -> Row:
    """Tries one parser."""
    from rlhub.engines.rollout.vllm.parsers import VllmReplies
    from rlhub.errors import ConfigError

    tokenizer = tiny_tokenizer(sample, EXTRA.get(name, ()))
    tool, reasoning = (name, "") if kind == "tools" else ("", name)
    try:
        replies = VllmReplies(tool, reasoning, tokenizer, {} if tool else KWARGS)
    except ConfigError as error:
        return Row(kind=kind, name=name, verdict="refuses", why=str(error).partition("here: ")[2] or str(error))
    found = []
    for whole in (True, False):
        try:
            stream = replies.stream([TOOL] if tool else [], [])
            found.append(parts_of(stream, sample, tokenizer, whole=whole))
        except Exception as error:  # noqa: BLE001  the table's purpose is to tell of it
            return Row(kind=kind, name=name, verdict="differs", why=f"{'whole' if whole else 'streamed'}: {error!r}")
    cities = [(NAME, {KEY: city}) for city in CITIES if city in sample]
    right = found[0][2] == cities if tool else found[0][:2] == READ.get(name, (THOUGHT, REPLY))
    same = found[0] == found[1]
    why = "" if right and same else f"whole {found[0]}" + ("" if same else f", streamed {found[1]}")
    return Row(kind=kind, name=name, verdict="same" if right and same else "differs", why=why)


def rows(names: Sequence[str]) -> Iterator[Row]:
    """Tries the parsers with these names, or all."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for name in ToolParserManager.list_registered():
        if not names or name in names:
            yield row_of("tools", name, CALLS.get(name, ""))
    for name in ReasoningParserManager.list_registered():
        if not names or name in names:
            yield row_of("reasoning", name, THOUGHTS.get(name, THINK))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parsers to try; none: all")
    parser.add_argument("--list", action="store_true", help="print only those that differ or refuse")
    parser.add_argument("--streams", action="store_true", help="stream also where whole answers alone are read right")
    options = parser.parse_args()
    if options.streams:
        from rlhub.engines.rollout.vllm.parsers import WHOLE_CALLS, WHOLE_THOUGHTS

        WHOLE_CALLS.clear()
        WHOLE_THOUGHTS.clear()
    found = []
    for row in rows(options.names):
        found.append(row)
        if not options.list or row.verdict != "same":
            print(f"{row.kind:<10} {row.name:<24} {row.verdict:<8} {' '.join(row.why.split())[:300]}", flush=True)
    counts = {verdict: sum(row.verdict == verdict for row in found) for verdict in ("same", "differs", "refuses")}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(counts["differs"] > 0)


if __name__ == "__main__":
    sys.exit(main())
