"""The language of engines, checkpoints and resharding for weights.

pieces       pieces of named tensors, the regions that they cover, and the arithmetic of regions
fp8          weights in eight bits with a scale for each block
fingerprint  a number that tells whether two weights are equal, and the check that weights are finite
"""
