"""Random forests of conversations as rows of tokens: prompts, samples of them, turns that branch, rows that end early."""

from __future__ import annotations

import random

import torch
from torch import Tensor

VOCAB = 31
Turn = tuple[list[int], int]
"""Tokens, and 1 where the model wrote them."""


def conversations(draw: random.Random, *, most_rows: int = 12) -> list[list[Turn]]:
    """Returns rows as turns; the first turn of each is its prompt."""
    rows: list[list[Turn]] = []
    count = draw.randint(2, most_rows)
    while len(rows) < count:
        kind = draw.random()
        if rows and kind < 0.7:  # another branch of a conversation, from some turn or from the middle of one
            row = list(draw.choice(rows))
            row = row[: draw.randint(1, len(row))]
            if kind < 0.2 and len(row) > 1:
                tokens, written = row.pop()
                row.append((tokens[: draw.randint(1, len(tokens))], written))
        else:
            row = [(_tokens(draw, 6), 0)]
        for _ in range(draw.randint(1 if len(row) == 1 else 0, 3)):
            row.append((_tokens(draw, 5), int(draw.random() < 0.7)))
        rows.append(row)
    return rows


def _tokens(draw: random.Random, most: int) -> list[int]:
    return [draw.randrange(3, VOCAB) for _ in range(draw.randint(1, most))]


def rows_of(found: list[list[Turn]], seed: int) -> dict[str, Tensor]:
    """Returns columns as workers give them to an engine, prompts padded on the left and responses on the right, with random
    `target` (rows, response) for a loss."""
    prompt = max(len(row[0][0]) for row in found)
    texts = [[token for tokens, _ in row[1:] for token in tokens] for row in found]
    width = max(map(len, texts))
    ids, mask = (torch.zeros(len(found), prompt + width, dtype=torch.int64) for _ in range(2))
    response_mask = torch.zeros(len(found), width, dtype=torch.int64)
    for number, (row, text) in enumerate(zip(found, texts, strict=True)):
        first, last = prompt - len(row[0][0]), prompt + len(text)
        ids[number, first:last] = torch.tensor(row[0][0] + text)
        mask[number, first:last] = 1
        response_mask[number, : len(text)] = torch.tensor([written for tokens, written in row[1:] for _ in tokens])
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(response_mask.shape, generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "response_mask": response_mask, "target": target}
