"""The Megatron-core training engine."""
