"""Typed events of a run, and where they go."""
