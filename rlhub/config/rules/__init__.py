"""Rules between settings: sizes that follow from others, checks before anything starts, and settings that have no effect."""
