"""Measure and decide: arithmetic on recorded rounds. No mlx, no asyncio, no clock."""
