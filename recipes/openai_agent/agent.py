"""An agent as one finds them: it knows OpenAI's client and nothing of who answers.

It asks for the sum, reads the last number of what it gets, and says how well that went.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionUserMessageParam

NUMBER = re.compile(r"\d+")


@cache
def shared() -> AsyncOpenAI:
    """Connections for all tasks: a client of its own for each would spend most of its time on reading certificates."""
    return AsyncOpenAI(base_url="http://localhost", api_key="none")


async def run(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    """1.0 if the answer to the row's problem is right, else 0.0."""
    client = shared().with_options(base_url=base_url, api_key=api_key)
    question: ChatCompletionUserMessageParam = {"role": "user", "content": row["raw_prompt"]}
    answer = await client.chat.completions.create(model="policy", messages=[question], temperature=1.0)
    numbers = NUMBER.findall(answer.choices[0].message.content or "")
    return float(bool(numbers) and numbers[-1].lstrip("0") == row["ground_truth"])
