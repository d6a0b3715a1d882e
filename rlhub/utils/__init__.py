"""Leaves that every layer may use.

children/        processes that may be killed: rewards, tools, environments
aio/             asyncio in threads: event loops, a task runner, queues of results
faults           a plan of failures, which proves that a run survives them
seeding          random numbers that depend on what is sampled alone
balance          splits rows by length over ranks and passes
timing           the time of named phases
atomic           files that are complete or absent
shared_segments  memory that processes of one machine map
ports            TCP ports for processes that meet
collector        pauses Python's garbage collector
redact           hides secrets in output
tool_calls       the types that tools, environments and workflows share
user_code        loads code that a setting names
"""
