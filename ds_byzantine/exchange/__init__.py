"""Moves bytes between replicas. Knows no rule and no host."""
