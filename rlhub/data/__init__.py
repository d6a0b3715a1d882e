"""Data files -> rows -> token ids -> batches in a resumable order.

files       rows of parquet and jsonl; checks before start (no torch)
tokenizing  prompt text or chat messages -> token ids; length policy
order       the order of rows: seed, epoch, cursor
prompts     PromptDataset, PromptLoader: prompts for reinforcement learning
sft         SFTDataset, SFTLoader: demonstrations with a loss mask
preference  PreferenceDataset: pairs of a chosen and a rejected answer
"""

from rlhub.data.files import AGENT_NAME, check_columns, check_files, has_column, load_rows

__all__ = ["AGENT_NAME", "check_columns", "check_files", "has_column", "load_rows"]
