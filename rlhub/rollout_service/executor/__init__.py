"""Runs episodes for training: how many groups run at once, how old their weights may be, and what becomes of each prompt, exactly
once.

    executor.py        admits prompts, runs their episodes, returns finished groups
    staleness.py       the bound on policy versions between sampling and training (AReaL, arXiv 2505.24298, section 5.1)
    ledger.py          the phase of each prompt
    episode_groups.py  the trajectories of one prompt
    batches.py         finished groups to training batches: delivery, the limit on failures, and the columns
    statistics.py      the metrics
"""
