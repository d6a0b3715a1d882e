"""Asyncio in threads: an event loop of its own, a runner of many tasks with deadlines, and the results they end with."""
