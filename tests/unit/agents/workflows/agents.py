"""Agents as users have them: nothing of rlhub in here."""

from __future__ import annotations

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
