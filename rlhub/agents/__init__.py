"""What an agent does with a policy: episodes as asyncio programs, and the services they run against.

trajectory.py      one episode's tokens, who wrote them, their log-probs and policy versions
partials.py        responses in parts, when the weights change while they are written
workflows/         the episodes: single turn, multi-turn, tools, environments, agents that speak to an OpenAI endpoint
openai_server/     an OpenAI-compatible endpoint, which records what agents sample through it as tokens
remote/            episodes and environments in actors of their own
"""
