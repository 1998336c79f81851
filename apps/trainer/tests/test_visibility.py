"""Who sees whom, against a plain re-statement in float64, as SDPA and as FlexAttention take it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_trainer.model.visibility import TILE, Visibility, number_runs
from torch.nn.attention.flex_attention import flex_attention

CPU = torch.device("cpu")


def _documents(starts: list[set[int]], num_positions: int) -> torch.Tensor:
    rows = [[sum(at >= start for start in row) for at in range(num_positions)] for row in starts]
    return torch.tensor(rows)


def _seen(num_positions: int, window: int, documents_BS: torch.Tensor | None) -> torch.Tensor:
    """Return who sees whom, position by position, (B, S, S)."""
    batch = 1 if documents_BS is None else len(documents_BS)
    seen = torch.zeros(batch, num_positions, num_positions, dtype=torch.bool)
    for b in range(batch):
        for q in range(num_positions):
            for k in range(q + 1):
                near = window == 0 or q - k < window
                same = documents_BS is None or documents_BS[b, q] == documents_BS[b, k]
                seen[b, q, k] = near and bool(same)
    return seen


def _attention(query, key, value, seen_BSS) -> torch.Tensor:
    """Attend in float64, one head at a time."""
    query, key, value = query.double(), key.double(), value.double()
    groups = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // groups].mT / query.shape[-1] ** 0.5
        chances = scores.masked_fill(~seen_BSS, -torch.inf).softmax(-1)
        heads.append(chances @ value[:, head // groups])
    return torch.stack(heads, 1)


def _tensors(batch: int, positions: int, *, heads: int = 4, groups: int = 2, channels: int = 8):
    generator = torch.Generator().manual_seed(positions)
    return [
        torch.randn(batch, count, positions, channels, generator=generator).requires_grad_()
        for count in (heads, groups, groups)
    ]


@st.composite
def _cases(draw):
    positions = draw(st.integers(1, 20))
    window = draw(st.integers(0, positions + 2))
    cuts = st.sets(st.integers(1, positions), max_size=4)
    rows = draw(st.none() | st.lists(cuts, min_size=2, max_size=2))
    return positions, window, None if rows is None else _documents(rows, positions)


@settings(max_examples=60, deadline=None)
@given(_cases())
def test_attention_and_gradients_equal_the_re_statement(case):
    positions, window, documents = case
    tensors = _tensors(2, positions)
    mixed = Visibility(positions, CPU, documents).attend(*tensors, window=window)
    expected = _attention(*tensors, _seen(positions, window, documents))
    torch.testing.assert_close(mixed.double(), expected, rtol=0, atol=1e-5)
    slopes = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).double()
    ours = torch.autograd.grad((mixed * slopes).sum(), tensors)
    theirs = torch.autograd.grad((expected * slopes).sum(), tensors)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(_cases())
def test_the_mask_is_who_sees_whom(case):
    positions, window, documents = case
    mask = Visibility(positions, CPU, documents).mask(window or positions)
    assert torch.equal(mask[:, 0], _seen(positions, window, documents))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_tiles_are_exactly_those_seen_in_part_and_whole(data):
    positions = data.draw(st.integers(1, 5 * TILE))
    window = data.draw(st.integers(1, positions))
    cuts = st.sets(st.integers(1, positions), max_size=5)
    rows = data.draw(st.none() | st.lists(cuts, min_size=2, max_size=2))
    documents = None if rows is None else _documents(rows, positions)
    view = Visibility(positions, CPU, documents)
    seen = view.mask(window)[:, 0]
    block_mask = view.block_mask(window)
    num_tiles = -(-positions // TILE)
    whole = torch.zeros(len(seen), num_tiles, num_tiles, dtype=torch.bool)
    listed = torch.zeros_like(whole)
    for b in range(len(seen)):
        for i in range(num_tiles):
            for counts, indices, into in (
                (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, whole),
                (block_mask.kv_num_blocks, block_mask.kv_indices, listed),
            ):
                assert counts is not None
                assert indices is not None
                tiles = indices[b, 0, i, : int(counts[b, 0, i])].tolist()
                assert tiles == sorted(set(tiles))
                into[b, i, tiles] = True
    assert not (whole & listed).any(), "a tile is seen in part or whole"
    for b in range(len(seen)):
        for i in range(num_tiles):
            for j in range(num_tiles):
                part = seen[b, i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
                assert bool(part.any()) == bool(whole[b, i, j] | listed[b, i, j])
                # A ragged last tile may be called whole: what lies past the end is nobody's.
                if whole[b, i, j]:
                    assert part.all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [0, 1, 50, 130, 300])
@pytest.mark.parametrize("cuts", [None, [{7, 128, 290}, {256}]])
def test_flex_attention_reads_the_block_mask_as_sdpa_reads_the_mask(window, cuts):
    positions = 330
    documents = None if cuts is None else _documents(cuts, positions)
    view = Visibility(positions, CPU, documents)
    tensors = [tensor.detach() for tensor in _tensors(2, positions, channels=16)]
    flex = flex_attention(
        *tensors, block_mask=view.block_mask(window or positions), enable_gqa=True
    )
    assert isinstance(flex, torch.Tensor)
    torch.testing.assert_close(flex, view.attend(*tensors, window=window), rtol=0, atol=1e-5)


def test_documents_may_have_any_ids_and_need_not_grow():
    documents = torch.tensor([[7, 7, 3, 3, 9, 7], [0, 1, 2, 2, 2, 0]])
    expected = torch.tensor([[0, 0, 1, 1, 2, 3], [0, 1, 2, 2, 2, 3]], dtype=torch.int32)
    assert torch.equal(number_runs(documents), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 40, 200])
@pytest.mark.parametrize("with_documents", [False, True])
def test_flex_attention_on_a_gpu(dtype, window, with_documents):
    positions = 300
    documents = _documents([{9, 128, 250}, {131}], positions) if with_documents else None
    tensors = _tensors(2, positions, channels=64)
    expected = _attention(*tensors, _seen(positions, window, documents))
    theirs = torch.autograd.grad(expected.sum(), tensors)
    device = torch.device("cuda")
    on_gpu = [tensor.detach().to(device, dtype).requires_grad_() for tensor in tensors]
    there = None if documents is None else documents.to(device)
    mixed = Visibility(positions, device, there).attend(*on_gpu, window=window)
    ours = torch.autograd.grad(mixed.float().sum(), on_gpu)
    bound = 0.05 if dtype == torch.bfloat16 else 5e-3
    torch.testing.assert_close(mixed.double().cpu(), expected, rtol=bound, atol=bound)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.float().cpu(), other, rtol=bound, atol=4 * bound)
