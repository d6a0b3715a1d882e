"""Asynchronous episodes: what an agent does with a policy, how many run at once, and what becomes of each prompt."""
