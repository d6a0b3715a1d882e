"""How many episodes run at once, how old their weights may be, and what becomes of each prompt: exactly once.

executor.py        admits prompts, runs their episodes, hands out finished groups
staleness.py       the bound on policy versions between sampling and training (AReaL, arXiv 2505.24298, section 5.1)
ledger.py          where each prompt is; delivery.py: which groups train next, and how many may fail
episode_groups.py  the trajectories of one prompt; batches.py: groups as a training batch
statistics.py      what it reports
"""
