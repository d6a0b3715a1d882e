"""The language of engines, checkpoints and resharding for weights.

pieces       pieces of named tensors, the regions that they cover and their arithmetic, and weights in eight bits
fingerprint  a number that tells whether two weights are equal, and the check that weights are finite
"""
