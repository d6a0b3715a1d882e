"""Data files -> rows -> token ids -> batches in a resumable order.

files.py        rows of parquet and jsonl files; checks before the start, without torch
images.py       pictures in rows, and their places in chat messages
tokenizing.py   prompt text or chat messages -> token ids; the policy for lengths
samplers.py     which rows come next: uniform, curriculum, mixture
order.py        the resumable order of rows, by a sampler
episodes.py     recorded episodes of robots (LeRobot's format), the demonstrations in them, and actions as tokens
prompts.py      PromptDataset and PromptLoader: prompts for reinforcement learning
supervised.py   SFTDataset, demonstrations with a loss mask; PreferenceDataset, pairs of a chosen and a rejected answer
"""

from rlhub.data.files import AGENT_NAME, check_columns, check_episode_folders, check_files, has_column, load_rows, texts_of

__all__ = ["AGENT_NAME", "check_columns", "check_episode_folders", "check_files", "has_column", "load_rows", "texts_of"]
