"""Writes the counting task's model with random weights: `python recipes/vlm_count/build_model.py --seed 1 --out FOLDER`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes.tiny_vlm import write_model
from recipes.vlm_count.generate import WORDS

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--architecture", choices=("qwen2_5_vl", "smolvlm"), default="smolvlm")
    options = parser.parse_args()
    write_model(options.out, options.seed, WORDS, options.architecture)
