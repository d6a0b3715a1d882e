"""Asyncio in threads.

loop_thread  an event loop on a thread of its own
task_runner  many tasks with deadlines on one event loop
results      the results of tasks, and the queue that hands them to threads
"""
