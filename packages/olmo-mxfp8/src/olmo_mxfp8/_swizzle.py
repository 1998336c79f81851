"""The layout of scale bytes that Blackwell's scaled matrix units read.

A matrix of scales, one row a row of the operand and one column a block of 32 along the contraction,
is padded to whole tiles of 128 rows and 4 columns. Tiles lie one after another, those of one row of
tiles first, and within a tile row `r` and column `c` lie at

    16 (r mod 32) + 4 (r div 32) + c

so that 16 adjacent bytes belong to the rows r, r + 32, r + 64 and r + 96. Padding is byte 0, the
scale of a block of zeros. In a grouped product the rows of each expert begin a new tile.

Shapes: M rows, C columns, E experts. Source: cuBLAS 12.8, "1D block scaling factors layout".
"""

import torch

from ._expert_padding import padded_places, padded_size
from ._formats import check_tensor
from ._groups import check_offsets, read_offsets

ROWS, COLUMNS = 128, 4


def swizzle_scales(scales: torch.Tensor, offsets_E: torch.Tensor | None = None) -> torch.Tensor:
    """Lay scale bytes out in tiles of 128 x 4.

    Args:
        scales: uint8, `(M, C)`, such as the `scales` of an `MXTensor` of `(M, 32 C)` along its last
            dimension.
        offsets_E: int32, the inclusive ends of each expert's rows, at most M; None for one matrix.
            Rows past the last end go nowhere.

    Returns:
        uint8, flat. Without offsets `128 ceil(M / 128) * 4 ceil(C / 4)` bytes. With offsets room
        for any split of the rows, `128 (ceil(M / 128) + E)` rows, expert `e` from the row that the
        padded counts of those before it add up to; what is not used is byte 0.

    Raises:
        TypeError: A dtype is not as above.
        ValueError: A shape or device is not as above, or, on a CPU, the offsets are no ends of M
            rows.
    """
    _check("scales", scales)
    M, C = scales.shape
    if offsets_E is None:
        rows = _padded(M, ROWS)
        padded = scales.new_zeros(rows, _padded(C, COLUMNS))
        padded[:M, :C] = scales
    else:
        _check_offsets(offsets_E, scales.device, M)
        rows = padded_size(M, offsets_E.numel(), ROWS)
        # One row more, which takes the rows that belong to nobody.
        padded = scales.new_zeros(rows + 1, _padded(C, COLUMNS))
        place_M, _ = padded_places(offsets_E, M, ROWS)
        padded[:, :C].index_copy_(0, place_M, scales)
        padded = padded[:rows]
    # (row tile, r div 32, r mod 32, column tile, column within)
    tiles = padded.view(rows // ROWS, 4, 32, padded.shape[1] // COLUMNS, COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle_scales(
    swizzled: torch.Tensor, rows: int, cols: int, offsets_E: torch.Tensor | None = None
) -> torch.Tensor:
    """Undo `swizzle_scales`.

    Args:
        swizzled: What `swizzle_scales` returned.
        rows: M.
        cols: C.
        offsets_E: As there.

    Returns:
        uint8, `(M, C)`; byte 0 in rows past the last offset.

    Raises:
        TypeError: A dtype is not as above.
        ValueError: The size of `swizzled` is not that of such a matrix, or the offsets do not fit,
            as there.
    """
    check_tensor("swizzled", swizzled)
    if swizzled.dtype != torch.uint8:
        raise TypeError(f"`swizzled` must be torch.uint8, got {swizzled.dtype}.")
    if rows < 0 or cols < 0:
        raise ValueError(f"`rows` and `cols` must be at least 0, got {rows} and {cols}.")
    if offsets_E is None:
        tall = _padded(rows, ROWS)
    else:
        _check_offsets(offsets_E, swizzled.device, rows)
        tall = padded_size(rows, offsets_E.numel(), ROWS)
    wide = _padded(cols, COLUMNS)
    if swizzled.numel() != tall * wide:
        raise ValueError(
            f"`swizzled` must hold {tall} x {wide} bytes for {rows} rows and {cols} columns, "
            f"got {swizzled.numel()}."
        )
    tiles = swizzled.view(tall // ROWS, wide // COLUMNS, 32, 4, COLUMNS)
    padded = tiles.permute(0, 3, 2, 1, 4).reshape(tall, wide)[:, :cols]
    if offsets_E is None:
        return padded[:rows].contiguous()
    padded = torch.cat([padded, padded.new_zeros(1, cols)])
    return padded.index_select(0, padded_places(offsets_E, rows, ROWS)[0])


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _check(name: str, scales: torch.Tensor) -> None:
    check_tensor(name, scales)
    if scales.dtype != torch.uint8:
        raise TypeError(
            f"`{name}` must be torch.uint8, got {scales.dtype}; call `.view(torch.uint8)` on a "
            f"tensor of E8M0 scales."
        )
    if scales.ndim != 2:
        raise ValueError(
            f"`{name}` must have two dimensions, got shape {tuple(scales.shape)}; view a stack of "
            f"weights as one matrix."
        )


def _check_offsets(offsets_E: torch.Tensor, device: torch.device, num_rows: int) -> None:
    check_offsets(offsets_E, device)
    if device.type == "cpu":  # elsewhere the host would wait
        read_offsets(offsets_E, num_rows)
