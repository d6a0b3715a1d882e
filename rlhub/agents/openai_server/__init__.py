"""An OpenAI-compatible endpoint over any episode engine, which records what agents sample through it as tokens.

server.py       the HTTP routes, admission and sampling of requests
bodies.py       request bodies from JSON to dataclasses; tool_choice.py: the tools that a request offers
rendering.py    messages to prompt tokens, and completions to answers
streaming.py    the text and tool calls of an answer that may be sent before its end is known
answers.py      answers as OpenAI's JSON, whole or in chunks
sessions.py     the record of one agent's requests, and the trajectory that it becomes
admin.py        pause, resume and new weights, for a trainer of another job
errors.py       OpenAI's error object, and the reading of JSON bodies
"""
