"""Models built of Megatron-core's parts.  Only `checks` may be imported where megatron is not installed."""
