"""Processes for code that may raise, hang, crash, leak, fork or spy: reward functions, code that a model writes, environments.

driver -> supervisor -> (first process of a PID namespace ->) child -> whatever the code inside starts

pool.py        many calls of one function, for rewards and tools
process.py     one child as its driver sees it, and the containment that this machine allows
child.py       the program inside the child
launch.py      the interpreter of a child, its variables and its CPUs
supervisor.py  the process that ends the child with everything it has started
access.py      the environment variables that the code inside receives
wire.py        the messages on the pipes
"""
