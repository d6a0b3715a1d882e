"""Runs episodes: agents as asyncio programs over an engine that generates, and the services that they use.

trajectory.py   the tokens of one episode, with their origin, log-probs and policy versions
partials.py     saves the tokens of unfinished generations for a resumed run
workflows/      the episodes: single turn, multi-turn, tools, environments, agents that use an OpenAI endpoint
verifiers/      the environments of the library verifiers, in a Python of their own
openai_server/  an OpenAI-compatible endpoint, which records what agents sample through it as tokens
remote/         episodes and environments in actors of their own
"""
