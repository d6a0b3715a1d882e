"""Tests: `unit` mirrors the package, `integration` uses real processes, `e2e` runs whole jobs."""
