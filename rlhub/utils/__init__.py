"""Leaves that every layer may use: child processes, asyncio, seeds, faults, and small helpers named by their topic."""
