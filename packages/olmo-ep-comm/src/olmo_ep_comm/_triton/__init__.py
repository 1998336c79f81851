"""Triton kernels of the one-sided exchange; nothing in them reads the device from the host.

- `moves`: what `olmo_ep_comm._rowwise.moves` says, launched for one rank.
- `row_kernels`: whole rows, into peers, along chains and back.
- `word_kernels`: what each row is, and values of rows.
- `plan`: requests and plan, in four launches of `plan_kernels`.

This package is imported only where a kernel runs.
"""
