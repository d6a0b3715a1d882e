"""Agents as users have them: nothing of rlhub in here."""

from __future__ import annotations

import asyncio
from typing import Any

import openai


async def two_turns(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    http = openai.DefaultAsyncHttpxClient(verify=False)  # no certificates to read
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        messages: list[Any] = [{"role": "user", "content": row["question"]}]
        for _ in range(2):
            answer = await client.chat.completions.create(model="any", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "sure?"}]
    return 0.25


def plain(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    client = openai.OpenAI(base_url=base_url, api_key=api_key, http_client=openai.DefaultHttpxClient(verify=False))
    client.chat.completions.create(model="any", messages=[{"role": "user", "content": row["question"]}])


async def endless(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key=api_key, http_client=openai.DefaultAsyncHttpxClient(verify=False)
    ) as c:
        messages: list[Any] = [{"role": "user", "content": row["question"]}]
        while True:
            answer = await c.chat.completions.create(model="any", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "sure?"}]


async def silent(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    return


async def broken(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    raise KeyError("no such thing")


async def converse(client: openai.AsyncOpenAI, model: str, question: str, turns: int) -> list[str]:
    """Returns the ids of the responses of one conversation."""
    messages: list[Any] = [{"role": "user", "content": question}]
    ids = []
    for _ in range(turns):
        answer = await client.chat.completions.create(model=model, messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "sure?"}]
        ids.append(answer.id)
    return ids


def connected(base_url: str, api_key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=openai.DefaultAsyncHttpxClient(verify=False))


async def parallel(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    """Two conversations of three turns at the same time, which begin alike."""
    async with connected(base_url, api_key) as client:
        await asyncio.gather(*(converse(client, "any", row["question"], 3) for _ in range(2)))
    return 0.25


async def self_play(base_url: str, api_key: str, row: dict[str, Any]) -> dict[str, Any]:
    """A proposer, two solvers and a judge."""
    async with connected(base_url, api_key) as client:
        await converse(client, "proposer", row["question"], 1)
        await asyncio.gather(*(converse(client, "solver", row["question"], turns) for turns in (1, 2)))
        await converse(client, "judge", row["question"], 1)
    return {"rewards": row.get("rewards", {"proposer": 0.5, "solver": -1.0})}


async def by_response(base_url: str, api_key: str, row: dict[str, Any]) -> dict[str, Any]:
    """Three turns, of which the first and the last have rewards."""
    async with connected(base_url, api_key) as client:
        first, _, last = await converse(client, "any", row["question"], 3)
    return {"rewards": {first: 1.0, last: 8.0}}


async def unknown_response(base_url: str, api_key: str, row: dict[str, Any]) -> dict[str, Any]:
    async with connected(base_url, api_key) as client:
        await converse(client, "any", row["question"], 1)
    return {"rewards": {"chatcmpl-0": 1.0}}
