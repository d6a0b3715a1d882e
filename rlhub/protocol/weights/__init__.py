"""How engines, checkpoints and resharding speak of weights: pieces and regions of named tensors, and one fingerprint of all."""
