"""Triton kernels of the one-sided exchange; nothing in them reads the device from the host.

- `moves`: what `olmo_ep_comm._rowwise.moves` says, launched for one rank.
- `row_kernels`: whole rows, into peers, along chains and back.
- `word_kernels`: counts, the words that describe a row, and values of rows.

This package is imported only where a kernel runs.
"""
