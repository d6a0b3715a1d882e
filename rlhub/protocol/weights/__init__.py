"""The language of engines, checkpoints and resharding for weights: pieces and regions of named tensors, and fingerprints."""
