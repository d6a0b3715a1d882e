"""What soak_serve.py sends: each request follows from (seed, number) alone, and says which answers are right."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

VOCABULARY = 259  # of tests.support.chat_model
MODEL = "policy"
COMPLETIONS, CHAT, WEIGHTS = "/v1/completions", "/v1/chat/completions", "/admin/weights"
TEXTS = ("hello", "Ünïcödé ✓ 漢字 🙂", "a" * 90, "<turn>user: <end>", "\u0000\u200b\ufffe", "1 + 1 =", " ", "{{ 7 * 7 }}")
Manner = Literal["whole", "half_head", "half_body", "leave", "leave_stream", "pause"]


@dataclass(slots=True, kw_only=True)
class Sent:
    """One request.  right: statuses of which one must come; none: there is no answer.  manner: how it is sent; pause is a pause
    of the engine and its end.  key: which is sent, or what itself.  newest: the version in the body is the next one there is."""

    kind: str
    right: frozenset[int]
    path: str = COMPLETIONS
    method: str = "POST"
    body: Any = None
    raw: bytes | None = None
    key: str | bytes = "client"
    manner: Manner = "whole"
    newest: bool = False

    @property
    def data(self) -> bytes:
        return self.raw if self.raw is not None else b"" if self.body is None else json.dumps(self.body).encode()


@dataclass(slots=True)
class Fuzzer:
    """folders: two of this model's weights."""

    seed: int
    folders: tuple[str, str]
    kinds: dict[Callable[[random.Random], Sent], int] = field(init=False)

    def __post_init__(self) -> None:
        self.kinds = {
            self.valid: 30,
            self.streamed: 8,
            self.chat: 8,
            self.several: 3,
            self.no_json: 6,
            self.wrong_type: 10,
            self.out_of_range: 9,
            self.sampling: 5,
            self.lone_surrogate: 3,
            self.deep: 3,
            self.too_many: 3,
            self.too_long: 2,
            self.wrong_key: 3,
            self.wrong_place: 2,
            self.half_open: 3,
            self.leaver: 5,
            self.new_weights: 2,
            self.refused_weights: 2,
            self.paused: 2,
            self.looked_at: 1,
        }

    def request(self, number: int) -> Sent:
        """The so many-th."""
        draw = random.Random(f"{self.seed}/{number}")
        return draw.choices(list(self.kinds), list(self.kinds.values()))[0](draw)

    # --- what must be answered -----------------------------------------------------------------------------------------

    def _body(self, draw: random.Random) -> dict[str, Any]:
        body: dict[str, Any] = {"model": MODEL, "prompt": _ids(draw), "max_tokens": draw.randint(1, 24)}
        if draw.random() < 0.3:
            body["prompt"] = draw.choice(TEXTS)
        if draw.random() < 0.5:
            body |= {"temperature": draw.choice([0, 0.3, 1, 1.7]), "top_p": draw.choice([1, 0.9, 0.1])}
        if draw.random() < 0.3:
            body |= {"top_k": draw.choice([-1, 0, 1, 5, 10**6]), "seed": draw.randint(-(1 << 63), (1 << 63) - 1)}
        if draw.random() < 0.3:
            body |= {"stop": draw.choice(["e", ["a", "the"], [], None]), "logprobs": 0, "return_token_ids": True}
        if draw.random() < 0.2:
            body |= {"stop_token_ids": [draw.randrange(VOCABULARY)], "ignore_eos": draw.random() < 0.5}
        return body

    def valid(self, draw: random.Random) -> Sent:
        return Sent(kind="valid", right=frozenset({200}), body=self._body(draw))

    def streamed(self, draw: random.Random) -> Sent:
        return Sent(kind="streamed", right=frozenset({200}), body={**self._body(draw), "stream": True})

    def chat(self, draw: random.Random) -> Sent:
        roles = ["system", "user", "assistant", "tool", "developer"]
        messages = [{"role": draw.choice(roles), "content": draw.choice(TEXTS)} for _ in range(draw.randint(1, 3))]
        body = {"model": MODEL, "messages": messages, "max_tokens": draw.randint(1, 24), "stream": draw.random() < 0.4}
        return Sent(kind="chat", right=frozenset({200}), path=CHAT, body=body)

    def several(self, draw: random.Random) -> Sent:
        prompts = [_ids(draw) for _ in range(draw.randint(1, 4))]
        return Sent(kind="several", right=frozenset({200}), body={**self._body(draw), "prompt": prompts, "n": draw.randint(1, 4)})

    # --- what must be refused ------------------------------------------------------------------------------------------

    def no_json(self, draw: random.Random) -> Sent:
        good = json.dumps(self._body(draw)).encode()
        raw = draw.choice(
            [
                good[: draw.randrange(len(good))],
                good.replace(b":", b"=", 1),
                b"\xff\xfe" + good,
                good.decode().encode("utf-16"),
                b'{"prompt": [' + b"9" * 5000 + b"]}",
                b"[]",
                b"null",
                b'"text"',
                bytes(draw.randrange(256) for _ in range(draw.randint(1, 200))),
            ]
        )
        return Sent(kind="no JSON object", right=frozenset({400}), path=draw.choice([COMPLETIONS, CHAT]), raw=raw)

    def wrong_type(self, draw: random.Random) -> Sent:
        """Some happen to be right."""
        values: list[Any] = [None, True, -1, 0, 1.5, 2**70, float("nan"), "x", "", [], [[]], [None], {}, {"a": [1]}, [{"b": 2}]]
        body = self._body(draw)
        names = [
            "prompt",
            "max_tokens",
            "n",
            "seed",
            "stop",
            "stream",
            "temperature",
            "top_p",
            "top_k",
            "stop_token_ids",
            "start",
        ]
        names += [
            "logprobs",
            "stream_options",
            "ignore_eos",
            "return_token_ids",
            "model",
            "user",
            "suffix",
            "nonsense",
            "best_of",
        ]
        path = COMPLETIONS
        if draw.random() < 0.4:
            path, names = CHAT, [*names[1:], "messages", "tools", "tool_choice", "parallel_tool_calls"]
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            if draw.random() < 0.4:
                body["messages"][0][draw.choice(["role", "content", "tool_calls", "name"])] = draw.choice(values)
        for name in draw.sample(names, draw.randint(1, 2)):
            body[name] = draw.choice(values)
        return Sent(kind="wrong type", right=frozenset({200, 400}), path=path, body=body)

    def out_of_range(self, draw: random.Random) -> Sent:
        bad = draw.choice([-1, -(2**40), VOCABULARY, 999_999, 2**31, 2**63, 2**70])
        body = self._body(draw)
        if draw.random() < 0.3:
            body["stop_token_ids"] = [5, bad]
        else:
            ids = _ids(draw)
            ids.insert(draw.randrange(len(ids) + 1), bad)
            body["prompt"] = draw.choice([ids, [_ids(draw), ids]])
        return Sent(kind="id out of range", right=frozenset({400}), body={**body, "stream": draw.random() < 0.3})

    def sampling(self, draw: random.Random) -> Sent:
        bad: dict[str, Any] = draw.choice(
            [
                {"temperature": draw.choice([-0.1, 1e-7, 1e-42, 1e300, float("inf"), float("nan")])},
                {"top_p": draw.choice([0, -1, 1.1, float("nan")])},
                {"top_k": draw.choice([-2, 2**70])},
                {"seed": draw.choice([2**63, -(2**70)])},
                {"max_tokens": draw.choice([0, -5, 2**70])},
                {"start": draw.choice([-1, 10**6, 2**70])},
                {"n": draw.choice([0, -1])},
            ]
        )
        return Sent(kind="sampling out of range", right=frozenset({400}), body=self._body(draw) | bad)

    def lone_surrogate(self, draw: random.Random) -> Sent:
        text = "a\ud800b" if draw.random() < 0.5 else "\udfff"
        body = self._body(draw) | {draw.choice(["prompt", "stop", "user"]): text}
        if draw.random() < 0.4:
            chat = {"messages": [{"role": "user", "content": text}]}
            return Sent(kind="lone surrogate", right=frozenset({400}), path=CHAT, body=chat)
        return Sent(kind="lone surrogate", right=frozenset({400}), body=body)

    def deep(self, draw: random.Random) -> Sent:
        depth = draw.choice([65, 400, 900, 5000, 100_000])
        opened, closed = draw.choice([(b"[", b"]"), (b'{"a":', b"}")])
        field = draw.choice([b"prompt", b"messages", b"tools", b"metadata", b"stop"])
        raw = b'{"' + field + b'": ' + opened * depth + b"1" + closed * depth + b"}"
        return Sent(kind="deep", right=frozenset({400}), path=draw.choice([COMPLETIONS, CHAT]), raw=raw)

    def too_many(self, draw: random.Random) -> Sent:
        """n alone, or prompts times n."""
        ways: list[dict[str, Any]] = [{"n": 10**6}, {"n": 129}, {"n": 128, "prompt": [[5]] * 100}, {"prompt": [[5]] * 5000}]
        return Sent(kind="too many answers", right=frozenset({400}), body=self._body(draw) | draw.choice(ways))

    def too_long(self, draw: random.Random) -> Sent:
        prompt = draw.choice([[5] * 400, [5] * 50_000, "x" * 100_000])
        return Sent(kind="too long", right=frozenset({400}), body={**self._body(draw), "prompt": prompt})

    def wrong_key(self, draw: random.Random) -> Sent:
        keys: list[str | bytes] = [b"wrong", "schlüssel".encode(), b"\xff\xfe\xfc", b"", b"x" * 4000]
        if draw.random() < 0.4:
            return Sent(
                kind="wrong key", right=frozenset({401}), path="/admin/pause", body={}, key=draw.choice([*keys, "client"])
            )
        return Sent(kind="wrong key", right=frozenset({401}), body=self._body(draw), key=draw.choice([*keys, "admin"]))

    def wrong_place(self, draw: random.Random) -> Sent:
        path = draw.choice(
            ["/v1/nothing", "/", "/v1/completions/../..//", "/s/nobody/v1/completions", "/" + "x" * 3000, "/%ff%00"]
        )
        right = frozenset({400, 401, 404, 405})
        return Sent(kind="wrong place", right=right, path=path, method=draw.choice(["GET", "POST", "PUT"]), body={})

    # --- what does not end as it should --------------------------------------------------------------------------------

    def half_open(self, draw: random.Random) -> Sent:
        """No whole head: the connection is closed; no whole body: 408."""
        head = draw.random() < 0.5
        manner: Manner = "half_head" if head else "half_body"
        return Sent(kind="half-open", right=frozenset(() if head else {408}), body=self._body(draw), manner=manner)

    def leaver(self, draw: random.Random) -> Sent:
        body = {**self._body(draw), "max_tokens": 300, "ignore_eos": True, "stream": draw.random() < 0.5, "n": draw.randint(1, 3)}
        return Sent(kind="leaver", right=frozenset(), body=body, manner="leave_stream" if body["stream"] else "leave")

    # --- administration ------------------------------------------------------------------------------------------------

    def new_weights(self, draw: random.Random) -> Sent:
        """A newer one may overtake it."""
        body = {"folder": draw.choice(self.folders), "version": 0}
        return Sent(kind="new weights", right=frozenset({200, 409}), path=WEIGHTS, body=body, key="admin", newest=True)

    def refused_weights(self, draw: random.Random) -> Sent:
        if draw.random() < 0.3:
            body: dict[str, Any] = {"folder": self.folders[0], "version": 0}
            return Sent(kind="older weights", right=frozenset({409}), path=WEIGHTS, body=body, key="admin")
        folder = draw.choice(["x" * 5000, "/nowhere", "a\u0000b", "", 5, None, "/proc/self/mem"])
        body = {"folder": folder, "version": draw.choice([2**40, -1, "1", 1.5, None, True]) if draw.random() < 0.5 else 2**40}
        return Sent(kind="wrong weights", right=frozenset({400}), path=WEIGHTS, body=body, key="admin")

    def paused(self, draw: random.Random) -> Sent:
        return Sent(kind="pause, resume", right=frozenset({200}), body={"recompute": draw.random() < 0.7}, manner="pause")

    def looked_at(self, draw: random.Random) -> Sent:
        path, key = draw.choice([("/health", "client"), ("/admin/status", "admin"), ("/v1/models", "client")])
        return Sent(kind="looked at", right=frozenset({200}), path=path, method="GET", key=key)


def _ids(draw: random.Random) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(draw.choice([1, 3, 17, 60]))]
