"""Reductions over gloo ranks: overlapped with backward or not, all-reduced or scattered."""

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from olmo_distopt import (
    GradientReducer,
    ReplicaGroups,
    ShardedAdamW,
    ShardedMuon,
    clip_grad_norm,
    global_grad_norm,
)
from olmo_distopt.reference import global_norm
from torch import nn

# A failure restarts the worker processes, so the example found is kept and not shrunk.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
MICROBATCHES, WINDOWS = 3, 3
# `counted`: the reducer is told how many gradients come, and counts them itself.
EVERYTHING = [
    {"overlap": overlap, "collective": collective, "counted": counted}
    for collective in ("all_reduce", "reduce_scatter")
    for overlap, counted in ((False, False), (True, False), (True, True))
]


def _shares(shape, index, window, microbatch, rank) -> torch.Tensor:
    """The gradient of parameter `index`; a power of two grid, so that FP32 sums are exact."""
    generator = torch.Generator().manual_seed(1000 * index + 100 * window + 10 * microbatch + rank)
    return torch.randint(-64, 64, shape, generator=generator) / 16.0


def _is_idle(index, window, microbatch, rank):
    """Whether a parameter has no part in a backward; some have none in the last one."""
    is_last = microbatch == MICROBATCHES - 1
    return index % 5 == 3 or (is_last and (index + window + rank) % 4 == 0)


def _expected(shapes, window, ranks):
    """The sum over microbatches and the replicas `ranks`, exact."""
    sums = []
    for index, shape in enumerate(shapes):
        total = torch.zeros(shape, dtype=torch.float64)
        for rank in ranks:
            for microbatch in range(MICROBATCHES):
                if not _is_idle(index, window, microbatch, rank):
                    total += _shares(shape, index, window, microbatch, rank).double()
        sums.append(total)
    return sums


def _groups(world, group_of):
    return ReplicaGroups(
        {"all": dist.group.WORLD, "own": None}, lambda name, _: group_of[int(name[1:])]
    )


def _run_windows(rank, world, shapes, group_of, bucket_bytes, options, counted):
    """Every window's gradients in order, those of a scattered parameter with NaN for scratch."""
    named: list[tuple[str, Any]] = [
        (f"p{i}", nn.Parameter(torch.ones(shape).bfloat16())) for i, shape in enumerate(shapes)
    ]
    groups = _groups(world, group_of)
    reducer = GradientReducer(
        named, groups, bucket_bytes=bucket_bytes, min_shard_numel=4, **options
    )
    windows = []
    for window in range(WINDOWS):
        reducer.zero(num_gradients=MICROBATCHES if counted else None)
        for microbatch in range(MICROBATCHES):
            # The order of the gradients is another one than that of the list, on every rank.
            order = torch.randperm(
                len(named), generator=torch.Generator().manual_seed(rank + 7 * microbatch)
            )
            terms = [
                (named[i][1].float() * _shares(shapes[i], i, window, microbatch, rank)).sum()
                for i in order.tolist()
                if not _is_idle(i, window, microbatch, rank)
            ]
            if not terms:
                continue
            last = microbatch == MICROBATCHES - 1
            with contextlib.nullcontext() if last or counted else reducer.no_sync():
                sum(terms, torch.zeros(())).backward()
        reducer.reduce()
        norms = [global_grad_norm(named, groups, norm_type=kind).item() for kind in (2.0, math.inf)]
        kept = []
        for _, parameter in named:
            grad = parameter.main_grad.clone()
            held = vars(parameter).get("main_grad_range")
            if held is not None:
                own = grad.view(-1).narrow(0, *held).clone()
                grad.fill_(math.nan).view(-1).narrow(0, *held).copy_(own)
            kept.append(grad)
            parameter.main_grad.fill_(math.nan)
        windows.append((kept, norms))
    reducer.close()
    assert not any("main_grad" in key for _, p in named for key in vars(p))
    return windows


def _every_option(rank, world, *arguments):
    return [
        _run_windows(
            *(rank, world, *arguments),
            {name: options[name] for name in ("overlap", "collective")},
            options["counted"],
        )
        for options in EVERYTHING
    ]


@pytest.mark.dist
@settings(max_examples=8, deadline=None, phases=PHASES)
@given(
    world=st.integers(1, 4),
    shapes=st.lists(
        st.lists(st.integers(0, 6), min_size=0, max_size=3).map(tuple), min_size=1, max_size=8
    ),
    bucket_bytes=st.sampled_from([1, 40, 200, 10**6]),
    own=st.sets(st.integers(0, 7), max_size=4),
)
# Several cut tensors, and whole ones, in one bucket.
@example(world=2, shapes=[(4,), (2, 3), (5,), (8,), (3, 4)], bucket_bytes=10**6, own={1})
@example(world=4, shapes=[(3, 4), (8,), (), (4, 4), (2,)], bucket_bytes=100, own=set())
def test_every_option_gives_the_exact_sums(processes, world, shapes, bucket_bytes, own):
    _compare_sums(processes, world, shapes, bucket_bytes, own)


@settings(max_examples=3, deadline=None)
@given(
    world=st.integers(5, 7),
    sizes=st.lists(st.sampled_from([0, 1, 2, 7]), min_size=1, max_size=4),
    bucket_bytes=st.sampled_from([40, 10**6]),
    own=st.sets(st.integers(0, 3), max_size=2),
)
@example(world=6, sizes=[2, 1, 0], bucket_bytes=10**6, own={3})
def test_sums_over_five_to_seven_ranks(threads, world, sizes, bucket_bytes, own):
    """Tensors that divide by a group of no power of two, and one that does not."""
    shapes = [*((size, world) for size in sizes), (3, 3)]
    _compare_sums(threads, world, shapes, bucket_bytes, own)


def _compare_sums(ranks, world, shapes, bucket_bytes, own):
    group_of = ["own" if index in own else "all" for index in range(len(shapes))]
    results = ranks.run(_every_option, shapes, group_of, bucket_bytes, world=world)
    for rank, by_option in enumerate(results):
        for options, windows in zip(EVERYTHING, by_option, strict=True):
            for window, (grads, (norm, largest)) in enumerate(windows):
                both = {"all": range(world), "own": [rank]}
                sums = {key: _expected(shapes, window, ranks) for key, ranks in both.items()}
                for index, grad in enumerate(grads):
                    want = sums[group_of[index]][index]
                    numel = want.numel()
                    cut = (
                        group_of[index] == "all" and world > 1 and numel >= 4 and not numel % world
                    )
                    cut = cut and options["collective"] == "reduce_scatter"
                    held = slice(rank * numel // world, (rank + 1) * numel // world)
                    held = held if cut else slice(None)
                    assert torch.equal(grad.view(-1)[held].double(), want.view(-1)[held]), options
                    assert int(grad.isnan().sum()) == (numel - numel // world if cut else 0)
                counted = [
                    _expected(shapes, window, range(world) if of == "all" else [owner])[index]
                    for index, of in enumerate(group_of)
                    for owner in (range(world) if of == "own" else [0])
                ]
                assert norm == pytest.approx(global_norm(counted).item(), rel=1e-6)
                assert largest == global_norm(counted, norm_type=math.inf).item()


def _launches(rank, world, counted):
    """The collectives in order, those within backward marked."""
    calls, phase = [], ["backward"]
    real = dist.all_reduce

    def noted(tensor, **options):
        calls.append((phase[0], tensor.numel()))
        return real(tensor, **options)

    named: list[tuple[str, Any]] = [(f"p{i}", nn.Parameter(torch.ones(i + 2))) for i in range(4)]
    groups = _groups(world, ["all"] * 4)
    reducer = GradientReducer(named, groups, bucket_bytes=1, overlap=True)
    dist.all_reduce = noted
    try:
        for window in range(2):
            # Rank 1 brings its gradients in the opposite order; window 1 leaves out the first.
            if counted:
                reducer.zero(num_gradients=2)
            with contextlib.nullcontext() if counted else reducer.no_sync():
                sum(p.sum() for _, p in named).backward()
            for _, parameter in named if rank else reversed(named):
                if window == 0 or parameter.numel() != 5:
                    parameter.sum().backward()
            phase[0] = "reduce"
            reducer.reduce()
            phase[0] = "backward"
            with pytest.raises(RuntimeError, match=r"after `reduce\(\)`"):
                named[0][1].sum().backward()
            named[0][1].grad = None
            grads = [parameter.main_grad[0].item() for _, parameter in named]
            assert grads == [4.0, 4.0, 4.0, 2.0 if window else 4.0]
            reducer.zero()
    finally:
        dist.all_reduce = real
    return calls


@pytest.mark.dist
@pytest.mark.parametrize("counted", [False, True])
def test_reductions_start_within_backward_in_one_order(processes, counted):
    """Buckets of p3, p2, p1, p0 with 5, 4, 3, 2 elements; none starts before one ahead of it."""
    for calls in processes.run(_launches, counted, world=2):
        assert [numel for _, numel in calls] == [5, 4, 3, 2] * 2
        assert [phase for phase, _ in calls] == ["backward"] * 4 + ["reduce"] * 4


class _AddsItself(torch.autograd.Function):
    """`x * w` whose backward adds to `w.main_grad` and gives autograd nothing for `w`."""

    @staticmethod
    def forward(ctx, x, weight, reducer):
        ctx.weight, ctx.reducer = weight, reducer
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        ctx.weight.main_grad.add_(grad * x)
        if ctx.reducer is not None:
            ctx.reducer.gradient_added(ctx.weight)
        return grad * weight, None, None


def _fused(rank, world):
    """The same gradients, brought by autograd, by a kernel that says so, by one that does not."""
    groups = ReplicaGroups({"all": dist.group.WORLD}, lambda name, _: "all")
    results = []
    for how in ("autograd", "said", "silent"):
        weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        named = [("other", other), ("weight", weight)]
        reducer = GradientReducer(named, groups, bucket_bytes=1, overlap=True)
        for microbatch in range(2):
            hidden = other * 2 * (torch.arange(3.0) + rank + microbatch)
            if how == "autograd":
                y = hidden * weight
            else:
                y = _AddsItself.apply(hidden, weight, reducer if how == "said" else None)
            with reducer.no_sync() if microbatch == 0 else contextlib.nullcontext():
                y.sum().backward()
        if how == "silent":  # the bucket may be reduced by now, which a late kernel must not miss
            late = _AddsItself.apply(torch.ones(3, requires_grad=True), weight, None)
            with pytest.raises(RuntimeError, match="`weight` must get one gradient a window"):
                late.sum().backward()
            break
        reducer.reduce()
        results.append((weight.main_grad.tolist(), other.main_grad.tolist()))
    return results


@pytest.mark.dist
def test_a_kernel_may_add_to_the_buffer_itself(processes):
    for autograd, said in processes.run(_fused, world=2):
        assert autograd == said == ([8.0, 16.0, 24.0], [8.0, 16.0, 24.0])


def test_a_silent_kernel_without_overlap(alone):
    weight = nn.Parameter(torch.ones(3))
    reducer = GradientReducer([("weight", weight)], alone)
    for _ in range(2):
        x = torch.arange(3.0).requires_grad_()
        _AddsItself.apply(x, weight, None).sum().backward()
    reducer.reduce()
    assert weight.main_grad.tolist() == [0.0, 2.0, 4.0]


def _chunks(rank, world, overlap):
    """Two pipeline chunks on one process; each backward is handed its gradient by the next."""
    torch.manual_seed(0)
    chunks = [nn.Linear(3, 4), nn.Linear(4, 2)]
    named = [
        (f"{i}.{name}", p) for i, chunk in enumerate(chunks) for name, p in chunk.named_parameters()
    ]
    groups = ReplicaGroups({"all": dist.group.WORLD}, lambda name, _: "all")
    reducer = GradientReducer(named, groups, bucket_bytes=40, overlap=overlap)
    reference = [nn.Linear(3, 4), nn.Linear(4, 2)]
    for mine, theirs in zip(chunks, reference, strict=True):
        theirs.load_state_dict(mine.state_dict())
    for _ in range(2):
        saved = []
        for microbatch in range(3):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * microbatch + rank))
            hidden = chunks[0](x)
            received = hidden.detach().requires_grad_()
            saved.append((hidden, received, chunks[1](received).square().sum()))
        # As interleaved schedules do: the last backward of chunk 1 comes before others of chunk 0.
        for microbatch, chunk in [(0, 1), (1, 1), (0, 0), (2, 1), (1, 0), (2, 0)]:
            hidden, received, loss = saved[microbatch]

            with reducer.no_sync() if microbatch < 2 else contextlib.nullcontext():
                if chunk == 1:
                    loss.backward()
                else:
                    torch.autograd.backward(hidden, received.grad)
        reducer.reduce()
        kept = [p.main_grad.clone() for _, p in named]
        reducer.zero()
    for microbatch in range(3):
        for r in range(world):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * microbatch + r))
            reference[1](reference[0](x)).square().sum().backward()
    wanted = [p.grad for chunk in reference for p in chunk.parameters()]
    for grad, want in zip(kept, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-5)
    return kept


@pytest.mark.dist
def test_pipeline_chunks_overlap_with_the_same_bits(processes):
    plain, overlapped = (processes.run(_chunks, overlap, world=2) for overlap in (False, True))
    for ranks in zip(plain, overlapped, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(*ranks, strict=True))


def _tokens(rank, world, counts, as_tensor, empty):
    """A dense weight on every rank, an expert on this one alone; `counts` tokens by microbatch."""
    dense, expert = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))
    groups = _groups(world, ["all", "own"])
    reducer = GradientReducer([("p0", dense), ("p1", expert)], groups, overlap=True)
    total = 0
    for count in counts[rank]:
        count = 0 if empty else count
        loss = (dense.sum() + expert.sum()) * 0.0
        for token in range(count):
            loss = loss + (token + 1) * (dense.sum() + 10 * expert.sum())
        with reducer.no_sync():
            loss.backward()
        total += count
    reducer.reduce(num_tokens=torch.tensor(total) if as_tensor else total)
    assert torch.equal(dense.main_grad, dense.main_grad[0].expand(3))
    return dense.main_grad[0].item(), expert.main_grad[0, 0].item()


@pytest.mark.dist
@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_mean_is_over_the_tokens_of_all_ranks_and_microbatches(processes, as_tensor):
    counts = [[3, 0, 1], [5, 2, 2]]
    results = processes.run(_tokens, counts, as_tensor, False, world=2)
    sums = [sum(n * (n + 1) / 2 for n in each) for each in counts]
    for rank, (dense, expert) in enumerate(results):
        assert dense == pytest.approx(sum(sums) / 13)
        # Not divided by the tokens of its own replicas: they are 13 for every parameter.
        assert expert == pytest.approx(10 * sums[rank] / 13)
    assert processes.run(_tokens, counts, as_tensor, True, world=2) == [(0.0, 0.0)] * 2


def _lonely(rank, world):
    """Rank 1 holds no parameter, as a stage may, and still counts tokens."""
    weight: Any = nn.Parameter(torch.ones(2))
    named = [("w", weight)] if rank == 0 else []
    reducer = GradientReducer(named, ReplicaGroups({"own": None}, lambda *_: "own"))
    weight.sum().backward()
    reducer.reduce(num_tokens=1.0 + rank)
    return weight.main_grad.tolist() if rank == 0 else None


@pytest.mark.dist
def test_a_rank_without_parameters_counts_its_tokens(processes):
    assert processes.run(_lonely, world=2) == [[pytest.approx(1 / 3)] * 2, None]


def _scattered_training(rank, world, collective):
    """Clipped AdamW steps on random gradients; the clip takes part."""
    named: list[tuple[str, Any]] = [
        (f"p{i}", nn.Parameter(torch.linspace(-1, 1, math.prod(shape)).view(shape)))
        for i, shape in enumerate([(4, 6), (3,), (8,), (5, 2, 2)])
    ]
    groups = _groups(world, ["all"] * 4)
    reducer = GradientReducer(
        named, groups, collective=collective, min_shard_numel=8, bucket_bytes=200
    )
    optimizer = ShardedAdamW(named, groups, lr=0.1, min_shard_numel=8)
    norms = []
    for step in range(20):
        reducer.zero()
        for i, (_, parameter) in enumerate(named):
            (parameter * _shares(parameter.shape, i, step, 0, rank)).sum().backward()
        reducer.reduce()
        norms.append(clip_grad_norm(named, groups, 1.0).item())
        optimizer.step()
    return norms, [parameter.detach() for _, parameter in named]


@pytest.mark.dist
def test_twenty_clipped_steps_are_the_same_scattered_and_on_every_replica(processes):
    (norms, whole), *others = [
        result
        for collective in ("all_reduce", "reduce_scatter")
        for result in processes.run(_scattered_training, collective, world=2)
    ]
    assert min(norms) > 1.0
    for other_norms, weights in others:
        assert other_norms == norms
        assert all(torch.equal(a, b) for a, b in zip(weights, whole, strict=True))


def _mismatch(rank, world):
    weight: Any = nn.Parameter(torch.ones(4, 4))
    groups = _groups(world, ["all"])
    reducer = GradientReducer(
        [("p0", weight)], groups, collective="reduce_scatter", min_shard_numel=4
    )
    weight.sum().backward()
    reducer.reduce()
    for optimizer in (
        ShardedAdamW([("p0", weight)], groups, lr=1.0),
        ShardedMuon([("p0", weight)], groups, lr=1.0),
    ):
        with pytest.raises(ValueError, match=r"`main_grad` of `p0` .* left it in \[\d+, \d+\)"):
            optimizer.step()
    assert (weight == 1).all()
    matching = ShardedAdamW([("p0", weight)], groups, lr=1.0, min_shard_numel=4)
    matching.step()
    assert (weight != 1).all()


@pytest.mark.dist
def test_an_optimizer_that_needs_other_ranges_refuses(processes):
    processes.run(_mismatch, world=2)
