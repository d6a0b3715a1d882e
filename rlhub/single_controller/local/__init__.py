"""The in-process backend: world size 1, no Ray, a breakpoint in a worker is a breakpoint in the terminal.

group.py: worker groups whose one rank lives in the driver's process.  async_actor.py: actors on the event loop of a thread.
"""
