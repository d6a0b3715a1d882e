"""Workflows: each turns one prompt into trajectories (`base.py`), and is found by its name (`registry.py`)."""
