"""Sparse verification: scores of a few heads, the rows they choose, and what stands around it."""
