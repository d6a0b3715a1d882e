"""Workflows, each of which turns one prompt into a trajectory.

base.py         the interface of a workflow, its parts, and its inspection before a run
registry.py     the workflows by name
knobs.py        their settings
turns.py        single_turn and multi_turn; transcripts and chat templates
tool_agent.py environment.py openai_agent.py online.py   the other workflows
"""
