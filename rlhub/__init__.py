"""rlhub: reinforcement-learning post-training for language models.

Importing the package loads neither torch nor ray; import what you need from its modules.
"""

__version__ = "0.1.0"
