"""Holding out the end of a token file, at the border of two documents.

A file of terabytes is not read to find its documents. The part held out is the last of it, from the
end of document that lies nearest to the place asked for: whole documents, found by looking around
that place. A file that has no such border in its second half gives nothing.
"""

import numpy as np
from numpy.typing import NDArray

_BLOCK = 2**20  # ids looked at together


def heldout_border(
    tokens: NDArray[np.unsignedinteger], end_of_document: int, heldout_fraction: float
) -> int | None:
    """Return where the held-out documents of a file begin.

    Args:
        tokens: (n,), documents with an end after each.
        end_of_document: The id of the end.
        heldout_fraction: Of the tokens, in (0, 1).

    Returns:
        The position after an end of document, in [n / 2, n) with documents on both sides, nearest
        to `(1 - heldout_fraction) * n`; the earlier of two as near. `None` without one.
    """
    asked = round((1 - heldout_fraction) * len(tokens))
    # A border b has tokens[b - 1] = end, so b - 1 is looked for.
    first, last = max(1, (len(tokens) + 1) // 2) - 1, len(tokens) - 2
    asked = min(max(asked - 1, first), last)
    before = _last_end(tokens, end_of_document, first, asked)
    reach = last if before is None else min(last, asked + (asked - before))
    after = _first_end(tokens, end_of_document, asked, reach)
    if before is None or (after is not None and after - asked < asked - before):
        return None if after is None else after + 1
    return before + 1


def _last_end(
    tokens: NDArray[np.unsignedinteger], end_of_document: int, first: int, last: int
) -> int | None:
    for stop in range(last + 1, first, -_BLOCK):
        start = max(first, stop - _BLOCK)
        found = np.flatnonzero(tokens[start:stop] == end_of_document)
        if len(found):
            return start + int(found[-1])
    return None


def _first_end(
    tokens: NDArray[np.unsignedinteger], end_of_document: int, first: int, last: int
) -> int | None:
    for start in range(first, last + 1, _BLOCK):
        found = np.flatnonzero(tokens[start : min(start + _BLOCK, last + 1)] == end_of_document)
        if len(found):
            return start + int(found[0])
    return None
