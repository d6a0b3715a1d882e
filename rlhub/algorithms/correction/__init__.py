"""Corrections of the gap between the policies that sampled (mu) and that train (pi): weights, rejection, M2PO, A-3PO."""
