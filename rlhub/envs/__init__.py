"""Environments: what a policy acts in, and how episodes get them.

base: the interfaces, step environments and tool environments, and their limits.  registry: names of the environments below.
games, gymnasium: those that come with rlhub.  source: EnvironmentSource, which leases environments to episodes, and the source
that runs them here.  local: environments in this process, with deadlines.  pool: environments in killable processes; child is the
program of such a process.  remote: environments that another process or machine runs, called by name.
"""
