"""Leaf helpers, one topic per module; nothing here imports another part of rlhub but its errors."""
