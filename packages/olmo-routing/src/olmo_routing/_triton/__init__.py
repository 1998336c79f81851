"""Triton kernels of a router; nothing in them reads the device from the host.

- `gate`: scores, selection, weights and counts in one pass over the logits; and its backward.
- `plan`: the order of the routes by expert, with the maps in both directions.

This package is imported only where a kernel runs.
"""
