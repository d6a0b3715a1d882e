"""An OpenAI-compatible endpoint over any episode engine, which records what agents sample through it as tokens.

server.py       the HTTP routes and admission; answering.py: from a request to its sampled, recorded answers
bodies.py       request bodies from JSON to dataclasses; tool_choice.py: the tools that a request offers
shaping.py      the request fields that change the sampled distribution
rendering.py    messages to prompt tokens, and completions to answers
responses.py    the wire /v1/responses, and messages.py: Anthropic's /v1/messages, as chats
streaming.py    the text and tool calls of an answer that may be sent before its end is known
answers.py      answers as OpenAI's JSON, whole or in chunks
repeats.py      requests that a client sends again, because it has not received their answer
sessions.py     the record of one agent's requests, and the trajectory that it becomes
online.py       sessions that applications open over HTTP, with their rewards
admin.py        pause, resume and new weights, for a trainer of another job; the server's numbers for Prometheus
replicas.py     adding and removing replicas of a training run
errors.py       OpenAI's error object, and the reading of JSON bodies
"""
