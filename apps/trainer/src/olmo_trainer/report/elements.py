"""Pieces of a page: text and tables as HTML."""

import html
import math
import re
from collections.abc import Sequence


def text(value: object) -> str:
    """Escape text; write control characters as Python does, as HTML can hold none."""
    shown = str(value).encode("utf-8", "replace").decode("utf-8")
    shown = re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff]",
        lambda found: found[0].encode("unicode_escape").decode("ascii"),
        shown,
    )
    return html.escape(shown)


def table(heading: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Write a table; the first cell of a row names it."""
    head = "".join(f"<th>{text(cell)}</th>" for cell in heading)
    body = "".join(
        f"<tr><th>{text(name)}</th>{''.join(f'<td>{text(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def number(value: float) -> str:
    """Write a number in four figures, and what is none as a dash."""
    return "\u2013" if math.isnan(value) else f"{value:.4g}"
