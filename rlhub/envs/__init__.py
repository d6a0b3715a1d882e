"""Environments: what a policy acts in.  Their two interfaces, pools of processes that run them, and small ones to begin with."""
