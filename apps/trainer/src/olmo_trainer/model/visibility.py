"""What each position may see: itself and what came before, in its window and in its document.

    position q sees position k  <=>  k <= q,  q - k < window,  document[q] == document[k]

Made once for a forward and shared by its layers. Where nothing but order limits the view, torch's
causal SDPA does it. Else, on a GPU, FlexAttention skips every tile that nobody sees, so neither
time nor memory grows with S * S; on a CPU, where FlexAttention has no backward, SDPA takes a mask
of (B, 1, S, S) bytes.

Shapes: B sequences, S positions, A query heads, G key/value heads, C channels a head, N tiles.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

TILE = 128  # positions along a side of FlexAttention's tiles
LEAST_FLEX_CHANNELS = 16  # of a head: fewer fill no tensor core, and FlexAttention refuses them


class Visibility:
    """Who sees whom in one forward.

    Args:
        num_positions: S.
        device: Of the hidden states.
        documents_BS: Integers, equal within a document and different from its neighbours'; each
            document is one run of positions. `None`: one document a sequence.
    """

    def __init__(
        self,
        num_positions: int,
        device: torch.device,
        documents_BS: torch.Tensor | None = None,
    ) -> None:
        self.num_positions = num_positions
        self.device = device
        self.runs_BS = None if documents_BS is None else number_runs(documents_BS)
        self._masks: dict[int, torch.Tensor] = {}
        self._block_masks: dict[int, BlockMask] = {}

    def attend(
        self,
        query_BASC: torch.Tensor,
        key_BGSC: torch.Tensor,
        value_BGSC: torch.Tensor,
        *,
        window: int,
    ) -> torch.Tensor:
        """Mix the values each position sees, weighted by `softmax(q . k / sqrt(C))`.

        Args:
            query_BASC: Any floating dtype; A is a multiple of G.
            key_BGSC: Of the same dtype; so is the value.
            value_BGSC: (B, G, S, C).
            window: Positions seen, the own one included; 0 = all before.

        Returns:
            (B, A, S, C).
        """
        grouped = query_BASC.shape[1] != key_BGSC.shape[1]
        reach = min(window or self.num_positions, self.num_positions)
        if self.runs_BS is None and reach == self.num_positions:
            return F.scaled_dot_product_attention(
                query_BASC, key_BGSC, value_BGSC, is_causal=True, enable_gqa=grouped
            )
        if self.device.type == "cuda" and query_BASC.shape[-1] >= LEAST_FLEX_CHANNELS:
            mixed = _compiled_flex()(
                query_BASC,
                key_BGSC,
                value_BGSC,
                block_mask=self.block_mask(reach),
                enable_gqa=grouped,
            )
            assert isinstance(mixed, torch.Tensor), "FlexAttention was asked for no log-sum-exp"
            return mixed
        return F.scaled_dot_product_attention(
            query_BASC, key_BGSC, value_BGSC, attn_mask=self.mask(reach), enable_gqa=grouped
        )

    def mask(self, window: int) -> torch.Tensor:
        """Return who sees whom, bool (B, 1, S, S), B = 1 without documents; rows are who looks."""
        if window not in self._masks:
            at = torch.arange(self.num_positions, device=self.device)
            back = at[:, None] - at
            seen = ((back >= 0) & (back < window))[None]
            if self.runs_BS is not None:
                seen = seen & (self.runs_BS[:, :, None] == self.runs_BS[:, None, :])
            self._masks[window] = seen[:, None]
        return self._masks[window]

    def block_mask(self, window: int) -> BlockMask:
        """Return the same as FlexAttention takes it: tiles seen in part, and tiles seen whole."""
        if window not in self._block_masks:
            self._block_masks[window] = self._make_block_mask(window)
        return self._block_masks[window]

    def _make_block_mask(self, window: int) -> BlockMask:
        S, runs_BS = self.num_positions, self.runs_BS
        num_tiles = -(-S // TILE)
        tile = torch.arange(num_tiles, device=self.device)
        back = (tile[:, None] - tile) * TILE  # from the first of the keys to the first query
        any_seen = (back >= 0) & (back - TILE + 1 < window)
        all_seen = (back >= TILE) & (back + TILE - 1 < window)
        if runs_BS is not None:
            # Runs only grow along a sequence: a tile's first and last are its least and greatest.
            first_BN = runs_BS[:, ::TILE]
            last_BN = runs_BS[:, (tile * TILE + TILE - 1).clamp(max=S - 1)]
            any_seen = any_seen & (last_BN[:, None, :] >= first_BN[:, :, None])
            all_seen = all_seen & (first_BN[:, None, :] == last_BN[:, :, None])

        def sees(
            b: torch.Tensor, _: torch.Tensor, q: torch.Tensor, k: torch.Tensor
        ) -> torch.Tensor:
            near = (q >= k) & (q - k < window)
            return near if runs_BS is None else near & (runs_BS[b, q] == runs_BS[b, k])

        partly = _tile_lists(any_seen & ~all_seen)
        return BlockMask.from_kv_blocks(
            *partly, *_tile_lists(all_seen), BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=(S, S)
        )


def number_runs(documents_BS: torch.Tensor) -> torch.Tensor:
    """Return the number of each position's document in its sequence, from 0, int32 (B, S)."""
    runs_BS = torch.zeros_like(documents_BS, dtype=torch.int32)
    starts = documents_BS[:, 1:] != documents_BS[:, :-1]
    runs_BS[:, 1:] = starts.cumsum(-1, dtype=torch.int32)
    return runs_BS


def _tile_lists(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many tiles of each row are set and which, ascending, as BlockMask wants them."""
    tiles_B1NN = (tiles if tiles.ndim == 3 else tiles[None])[:, None].int()
    order = tiles_B1NN.argsort(dim=-1, descending=True, stable=True).int()
    return tiles_B1NN.sum(-1, dtype=torch.int32), order.contiguous()


@cache
def _compiled_flex() -> Callable[..., object]:
    return torch.compile(flex_attention, dynamic=False)
