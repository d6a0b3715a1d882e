"""Sandboxes: places in which a command that a model wrote runs without this machine's files, network, processes and secrets.

base.py       the interfaces Sandbox and SandboxProvider, limits and results
registry.py   the names of sandboxes, and a provider built from a setting
bwrap.py      Linux namespaces by bubblewrap, on this machine
docker.py     a container for each command, by docker's command line
workspace.py  the folder of a sandbox, as the host reads and writes it
tunnel.py     the one address that a command may reach, where it is given one
process.py    one command, with its limits on time and output, and the kernel's bound on the memory and processes of all

utils/children ends what its code has started and bounds it, but leaves it this user's files and network; a sandbox takes these
away.
"""
