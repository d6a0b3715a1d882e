"""Asyncio in threads: an event loop on its own thread, a runner of many tasks with deadlines, and the results of the tasks."""
