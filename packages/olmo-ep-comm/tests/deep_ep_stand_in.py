"""DeepEP 2.1 between CPU processes: its signatures and what a caller can observe of it.

Signatures and semantics are those of https://github.com/deepseek-ai/DeepEP at dd758ca within one
NVLink domain. Memory that DeepEP leaves uninitialised holds NaN here, or 0 for ids, which is a
valid expert; its known traps are kept. A loop over tokens stands for the kernels.
"""

import types
from typing import Any

import torch
import torch.distributed as dist

topk_idx_t = torch.int64
MIB_2 = 2 << 20


class EPHandle:
    def __init__(
        self,
        do_expand,
        num_experts,
        expert_alignment,
        num_max_tokens_per_rank,
        num_sms,
        topk_idx,
        num_recv_tokens,
        num_expanded_tokens,
        num_recv_tokens_per_expert_list,
        psum_num_recv_tokens_per_scaleup_rank,
        psum_num_recv_tokens_per_expert,
        num_unaligned_recv_tokens_per_expert,
        recv_src_metadata,
        dst_buffer_slot_idx,
        token_metadata_at_forward,
        channel_linked_list,
    ):
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})


class EventOverlap:
    def __init__(self, event=None):
        self.event = event

    def current_stream_wait(self):
        assert self.event is not None, "only valid with async_with_compute_stream=True"


def _align(value: int, step: int) -> int:
    return -(-value // step) * step


def _poison(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    value = torch.zeros(shape, dtype=dtype)
    return value.fill_(float("nan")) if dtype.is_floating_point and dtype.itemsize > 1 else value


class ElasticBuffer:
    def __init__(
        self,
        group,
        num_bytes=None,
        num_cpu_bytes=0,
        num_max_tokens_per_rank=0,
        hidden=0,
        num_topk=0,
        use_fp8_dispatch=False,
        deterministic=False,
        allow_hybrid_mode=True,
        allow_multiple_reduction=True,
        prefer_overlap_with_compute=True,
        sl_idx=3,
        num_allocated_qps=0,
        num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100,
        explicitly_destroy=False,
    ):
        assert group._get_sequence_number_for_group() > 0, (
            "the communicator of a group is there after its first collective; upstream reads it "
            "and ends the process"
        )
        self.group, self.rank_idx, self.num_ranks = group, group.rank(), group.size()
        self.num_cpu_timeout_secs = num_cpu_timeout_secs
        self.num_gpu_timeout_secs = num_gpu_timeout_secs
        self.num_bytes = num_bytes or _align(
            max(
                self.num_ranks * (hidden * 2 + num_topk * 12 + 4),
                min(self.num_ranks, num_topk) * (hidden * 2 + num_topk * 8),
            )
            * num_max_tokens_per_rank,
            MIB_2,
        )
        assert self.num_bytes % MIB_2 == 0
        self.num_max_tokens_per_rank, self.deterministic = num_max_tokens_per_rank, deterministic
        self.allow_multiple_reduction = allow_multiple_reduction
        self.explicitly_destroy, self.is_destroyed = explicitly_destroy, False
        self.calls: list[dict[str, Any]] = []
        dist.barrier(group)

    def destroy(self):
        assert self.explicitly_destroy
        assert not self.is_destroyed
        self.is_destroyed = True
        dist.barrier(self.group)

    def get_theoretical_num_sms(self, num_experts, num_topk):
        assert num_experts % self.num_ranks == 0  # None raises TypeError, as upstream
        return 24

    def _gather(self, tag: tuple, value: Any) -> list[Any]:
        out: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(out, (tag, value), group=self.group)
        assert all(other == tag for other, _ in out), "ranks disagree: DeepEP would hang"
        return [value for _, value in out]

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        cumulative_local_expert_recv_stats=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        expert_alignment=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
        handle=None,
        do_handle_copy=True,
        do_cpu_sync=None,
        do_expand=False,
        do_zero_padding=False,
        use_tma_aligned_col_major_sf=False,
    ):
        assert not self.is_destroyed
        is_cached = handle is not None
        if num_sms == 0:
            num_sms = self.get_theoretical_num_sms(num_experts, 1)
        x, sf = x if isinstance(x, tuple) else (x, None)
        _check_payload(x, sf)
        if is_cached:
            assert topk_idx is None
            assert not do_cpu_sync
            assert do_expand == handle.do_expand, "upstream returns the other layout silently"
            topk_idx = handle.topk_idx
        else:
            nmax = num_max_tokens_per_rank or self.num_max_tokens_per_rank
            _check_routes(x, topk_idx, topk_weights, nmax)
            handle = self._plan(
                topk_idx, num_experts, nmax, expert_alignment or 1, num_sms, do_expand, do_cpu_sync
            )
        self.calls.append(
            {"call": "dispatch", "is_cached": is_cached, "num_sms": num_sms, "dtype": x.dtype}
            | {"do_expand": do_expand, "do_cpu_sync": do_cpu_sync, "nmax": num_max_tokens_per_rank}
        )
        tag = ("dispatch", handle.num_experts, is_cached, do_expand, x.dtype, x.shape[1])
        # float8 cannot be pickled, and bytes need no arithmetic.
        dtype, sent = x.dtype, x.view(torch.uint8) if x.dtype.itemsize == 1 else x
        peers = self._gather(tag, (sent, sf, topk_weights))
        rows = self._rows_of(handle)
        recv_x = _poison(rows, x.shape[1], dtype=sent.dtype)
        recv_sf = None if sf is None else _poison(rows, sf.shape[1], dtype=sf.dtype)
        recv_w = None if topk_weights is None else _poison(rows, dtype=torch.float32)
        for row, rank, token, lane in handle.route_of_row:
            their_x, their_sf, their_w = peers[rank]
            recv_x[row] = their_x[token]
            if recv_sf is not None:
                recv_sf[row] = their_sf[token]
            if recv_w is not None:
                recv_w[row] = their_w[token, lane]
        recv_x = recv_x.view(dtype)
        out = recv_x if recv_sf is None else (recv_x, recv_sf)
        return out, None, recv_w, handle, EventOverlap()

    def _rows_of(self, handle) -> int:
        assert handle.do_expand, "the compact layout has no stand-in"
        return handle.num_expanded_tokens

    def _plan(self, topk_idx, num_experts, nmax, alignment, num_sms, do_expand, do_cpu_sync):
        """Give every (token, local expert) a row, in order of arrival unless deterministic."""
        tag = ("plan", nmax, num_experts, topk_idx.shape[1], alignment)
        ids = self._gather(tag, topk_idx)
        share, num_slots = num_experts // self.num_ranks, topk_idx.shape[1]
        first = share * self.rank_idx
        arrivals: list[list[tuple[int, int, int]]] = [[] for _ in range(share)]
        for rank, theirs in enumerate(ids):
            tokens = torch.arange(len(theirs))
            if not self.deterministic:
                tokens = tokens[torch.randperm(len(tokens))]
            for token in tokens.tolist():
                for lane, expert in enumerate(theirs[token].tolist()):
                    if first <= expert < first + share:
                        arrivals[expert - first].append((rank, token, lane))
        routes, ends, start = [], [], 0
        for rows in arrivals:
            routes += [(start + i, *route) for i, route in enumerate(rows)]
            ends.append(start + len(rows))
            start += _align(len(rows), alignment)
        worst = self.num_ranks * nmax * min(num_slots, share) + (alignment - 1) * share
        handle = EPHandle(
            do_expand=do_expand,
            num_experts=num_experts,
            expert_alignment=alignment,
            num_max_tokens_per_rank=nmax,
            num_sms=num_sms,
            topk_idx=topk_idx.clone(),
            num_recv_tokens=nmax * self.num_ranks,
            num_expanded_tokens=_align(worst, alignment) if do_cpu_sync is False else start,
            num_recv_tokens_per_expert_list=[],
            psum_num_recv_tokens_per_scaleup_rank=None,
            psum_num_recv_tokens_per_expert=torch.tensor(ends, dtype=torch.int32),
            num_unaligned_recv_tokens_per_expert=torch.tensor(
                [len(rows) for rows in arrivals], dtype=torch.int32
            ),
            recv_src_metadata=None,
            dst_buffer_slot_idx=None,
            token_metadata_at_forward=None,
            channel_linked_list=None,
        )
        handle.route_of_row = routes
        return handle

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
    ):
        assert not self.is_destroyed
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert x.shape == (self._rows_of(handle), x.shape[1])
        assert x.shape[1] % 256 == 0, "a static assertion of the kernel"
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32
            assert topk_weights.is_contiguous()
            assert topk_weights.shape == (len(x),)
        self.calls.append({"call": "combine", "has_weights": topk_weights is not None})
        partials: dict[tuple[int, int], torch.Tensor] = {}
        weights = []
        for row, rank, token, lane in sorted(handle.route_of_row, key=lambda route: route[1:]):
            partial = partials.setdefault((rank, token), torch.zeros(x.shape[1]))
            partial += x[row].float()
            if topk_weights is not None:
                weights.append((rank, token, lane, topk_weights[row].item()))
        sent = ({key: value.bfloat16() for key, value in partials.items()}, weights)
        tokens, num_slots = handle.topk_idx.shape
        total = torch.zeros(tokens, x.shape[1])
        home = torch.zeros(tokens, num_slots)
        tag = ("combine", x.shape[1], topk_weights is not None)
        for their_partials, their_weights in self._gather(tag, sent):
            for (rank, token), value in their_partials.items():
                if rank == self.rank_idx:
                    total[token] += value.float()
            for rank, token, lane, value in their_weights:
                if rank == self.rank_idx:
                    home[token, lane] = value
        return total.bfloat16(), None if topk_weights is None else home, EventOverlap()


def _check_payload(x, sf) -> None:
    assert x.dim() == 2
    assert x.is_contiguous()
    assert (x.shape[1] * x.element_size()) % 16 == 0
    assert x.dtype in (torch.bfloat16, torch.float8_e4m3fn)
    assert sf is None or (len(sf) == len(x) and sf.element_size() == 4)


def _check_routes(x, topk_idx, topk_weights, nmax) -> None:
    assert len(x) <= nmax
    assert topk_idx.dtype == topk_idx_t
    assert topk_idx.is_contiguous()
    assert len(topk_idx) == len(x)
    assert topk_idx.shape[1] <= 32
    for row in topk_idx:
        valid = row[row >= 0]
        assert valid.unique().numel() == valid.numel(), "a device assertion upstream"
    if topk_weights is not None:
        assert topk_weights.dtype == torch.float32
        assert topk_weights.is_contiguous()
        assert topk_weights.shape == topk_idx.shape


class Buffer:
    """The class of v1, which v2 exports too."""


class ElasticBufferOf20(ElasticBuffer):
    """Version 2.0: no zero padding, and no cached dispatch into the expanded layout."""

    def dispatch(self, x, topk_idx=None, topk_weights=None, handle=None, **options):
        assert handle is None or not options.get("do_expand"), "Cannot do expand with cached mode"
        return super().dispatch(x, topk_idx, topk_weights, handle=handle, **options)


class EPHandleOf20:
    def __init__(self, do_expand, num_experts):
        raise NotImplementedError


def make_module(version: str) -> types.ModuleType:
    """Return a module `deep_ep` of a version, for `sys.modules`."""
    module = types.ModuleType("deep_ep")
    names: dict[str, Any] = {"topk_idx_t": topk_idx_t, "Buffer": Buffer}
    if version == "2.1":
        names |= {"ElasticBuffer": ElasticBuffer, "EPHandle": EPHandle}
    elif version == "2.0":
        names |= {"ElasticBuffer": ElasticBufferOf20, "EPHandle": EPHandleOf20}
    elif version == "hybrid-ep":
        names |= {"HybridEPBuffer": Buffer}
    else:
        assert version == "v1", version
    module.__dict__.update(names)
    return module
