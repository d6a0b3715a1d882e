"""Corrections of the gap between the policies that sampled (mu) and that train (pi).

weights  importance weights of tokens and sequences, and A-3PO's proximal policy
correct  rejection, M2PO, and the whole correction of a batch, before its update or in it
"""
