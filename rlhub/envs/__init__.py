"""Environments: what a policy acts in, and how episodes lease them.

base.py          the interfaces of step environments and tool environments, and the limits of their calls
registry.py      the names of the environments that come with rlhub
games.py gymnasium.py   these environments
source.py        EnvironmentSource, which leases environments to episodes; the pool of killable processes; the table of leases
process.py       one such process
local.py         environments in this process, with deadlines
child.py         the program of such a process
remote.py        environments in another process or on another machine, called by method name
vector/          environments that act in lock-step, with pictures, for policies that act in chunks
"""
