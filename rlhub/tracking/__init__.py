"""Seeing a run: its folder, its metrics, the console, external trackers and the report."""
