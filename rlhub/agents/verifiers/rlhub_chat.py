"""The harness `rlhub_chat` of verifiers: a conversation with the task's tools, in the process of the environment.

verifiers' own harness `null` does the same with a program that `uv` installs and starts for each episode.  A failed request is
not repeated: the episode fails, and is repeated as a whole, so that no answer is sampled twice.  Where this file's folder is on
the path of the library, `--env.agent.harness.id rlhub_chat` evaluates with the harness of the training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import cache
from typing import Any

import httpx
from verifiers import v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]

Message = dict[str, Any]
FAILED, ANSWERED = 1, 0


@cache
def connections() -> httpx.AsyncClient:
    """Returns the connections to the interception server, shared by all conversations."""
    return httpx.AsyncClient(timeout=httpx.Timeout(None, connect=30.0), limits=httpx.Limits(max_connections=None))


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]  # verifiers is in another Python
    """Asks for an answer, calls the tools that it names, and so on until an answer names none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Any,
    ) -> Any:
        """Talks until the conversation ends.  The signature is that of verifiers.v1.Harness.launch."""
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            schemas, names, connected = await connect_mcp({"mcpServers": servers}, stack)
            body: Message = {"model": ctx.model, "messages": self._opening(data)} | ({"tools": schemas} if schemas else {})
            while True:
                response = await _ask(endpoint, secret, body)
                if response.status_code != httpx.codes.OK:
                    return _refused(response)
                message = response.json()["choices"][0]["message"]
                body["messages"].append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=ANSWERED, stdout="", stderr="")
                for call in message["tool_calls"]:
                    body["messages"].append(await _result(call, connected, names))

    def _opening(self, data: Any) -> list[Message]:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return messages + [message_to_wire(message) for message in prompt or []]


async def _ask(endpoint: str, secret: str, body: Message) -> httpx.Response:
    return await connections().post(f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"})


def _refused(response: httpx.Response) -> Any:
    """Returns how the conversation ends: as it should where its length is at its limit or the task stops it, or failed."""
    full = response.status_code == httpx.codes.BAD_REQUEST and "context_length_exceeded" in response.text
    return vf.ProgramResult(exit_code=ANSWERED if full else FAILED, stdout="", stderr=f"{response.status_code}: {response.text}")


async def _result(call: Message, servers: Any, names: Any) -> Message:
    """Returns the message with the result of a tool call; the policy reads its errors."""
    name, content = call["function"]["name"], ""
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except json.JSONDecodeError as error:
        content = f"error: the arguments are not valid JSON ({error}); send the call again"
    else:
        if not isinstance(arguments, dict):
            content = f"error: the arguments are a {type(arguments).__name__}; send an object"
        elif name not in names:
            content = f"error: there is no tool {name!r}; known: {', '.join(names) or 'none'}"
        else:
            content = await call_mcp(servers, names, name, arguments)
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
