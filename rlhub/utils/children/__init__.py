"""Processes for code that may raise, hang, crash, leak, fork or pry: reward functions, what a model writes, environments.

    driver -> supervisor -> (first process of a PID namespace ->) child -> whatever the code inside starts

pool: many calls of one function, as rewards and tools make them.  process: one child, as its driver sees it, and what this
machine allows for its containment.  child: the program inside.  supervisor: what ends all of it.  access: which environment
variables the code inside may read.  wire: what is said over the pipes.
"""
