"""Writes the recipe's policy with random weights: `python recipes/embodied_reach/build_model.py --seed 1 --out FOLDER`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes.embodied_reach.demonstrations import VLA, WORDS
from recipes.tiny_smolvlm import write_model

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    write_model(options.out, options.seed, WORDS, num_places=len(VLA.place_ids), num_bins=VLA.bins)
