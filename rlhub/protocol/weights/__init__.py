"""The language of engines, checkpoints and resharding for weights.

pieces       pieces of named tensors, the regions that they cover, and the arithmetic of regions
fingerprint  a number that tells whether two weights are equal, and the check that weights are finite
"""
