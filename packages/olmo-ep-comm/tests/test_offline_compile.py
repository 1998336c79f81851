"""Every kernel as it is launched on CUDA, compiled here for GPUs that need not be here.

The launchers run on CPU tensors and each launch only compiles. What comes out must spill no
register, fit into the shared memory, and move rows 16 bytes at a time.
"""

import re
from typing import Any

import pytest
import torch
from compiled_kernels import assert_fits, compiling_for
from olmo_ep_comm._rowwise.buffers import Buffers, Settings
from olmo_ep_comm._rowwise.checks import make_form
from olmo_ep_comm._rowwise.exchange import RowwiseExchange
from olmo_ep_comm._rowwise.memory import InProcessMemory, Shared, Stack, pointer_table
from olmo_ep_comm._rowwise.plan import SourcePlan
from olmo_ep_comm._rowwise.sizes import Form
from torch.overrides import TorchFunctionMode


def compile_all(dtype: torch.dtype, width: int, num_experts: int, top_k: int) -> None:
    """Launch every move once."""
    from olmo_ep_comm._triton import moves

    form = Form(
        num_ranks=2,
        num_experts=num_experts,
        max_tokens=16,
        width=width,
        top_k=top_k,
        dtype=dtype,
        capacity=64,
        scale_bytes=None,
        gradient_scale_bytes=None,
        live_forwards=1,
        combine_by="put",
    )
    buffers = {
        name: torch.empty(shape, dtype=kind) for name, (shape, kind) in form.shapes().items()
    }
    shared = {
        name: Shared([one], [one, one], pointer_table([one, one], one.device))
        for name, one in buffers.items()
    }
    ids = torch.zeros(16, top_k, dtype=torch.int32)
    plan = SourcePlan(ids, ids, ids, ids, ids[:, 0].contiguous(), torch.tensor(0))
    num_rows, meta = torch.zeros(4, dtype=torch.int32)[-1], buffers["meta"]
    rows = buffers["rows 0"].view(dtype)
    requests = moves.put_requests(shared["counts"], 1, ids.long(), 0, form)
    for admit in (None, lambda requested_SQL, capacity: requested_SQL):
        weights = torch.empty(16, top_k)
        moves.put_plan(shared["meta"], 1, requests, weights, buffers["counts"], admit, form)
    leases = buffers["counts"][:, form.lease_column]
    words = torch.empty(16, form.token_words, dtype=torch.int32)
    moves.put_rows(Stack([shared["rows 0"]]), leases, words, plan)
    moves.take_meta(meta, num_rows)
    for out in (buffers["rows 0"], buffers["gradients"]):
        moves.fan_out(buffers["rows 0"], out, meta, num_rows)
    moves.put_sums(shared["sums"], rows, meta, num_rows, form)
    moves.put_weights(shared["weights"], torch.empty(64), meta, num_rows, form)
    moves.add_sums(buffers["sums"], plan.num_sums_T, form)
    moves.keep_sums(rows.clone(), rows, meta, num_rows)
    moves.get_sums(shared["rows 0"].start((64, width), dtype), plan, form)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("dtype", "width", "num_experts", "top_k"),
    [(torch.bfloat16, 4096, 64, 8), (torch.float32, 7168, 512, 22), (torch.bfloat16, 40, 2, 1)],
)
def test_the_kernels_spill_nothing(dtype, width, num_experts, top_k, capability):
    with compiling_for(capability) as compiled:
        compile_all(dtype, width, num_experts, top_k)
    assert len(compiled) == 15
    for kernel in compiled:
        assert_fits(kernel)
        name = kernel.metadata.name
        if width >= 1024 and name in ("put_rows_kernel", "put_sums_kernel", "fan_out_kernel"):
            stores = re.findall(r"st\.global\S*", kernel.asm["ptx"])
            assert stores, f"{name} writes nothing"
            assert all(one.endswith((".v4.b32", ".v2.b64")) for one in stores), f"{name}: {stores}"
        if width == 4096 and name == "put_rows_kernel":  # one block of columns
            moved = re.findall(r"(ld|st)\.global", kernel.asm["ptx"])
            assert "ld" not in moved[moved.index("st") :], "a store waits for a load after a store"


# What runs nothing on a device: attributes, views, memory, and `contiguous` of what is contiguous.
NO_LAUNCH = {"__get__", "__len__", "__getitem__", "view", "empty", "empty_like", "contiguous"}
NO_LAUNCH |= {"data_ptr", "numel", "stride"}


class _Operations(TorchFunctionMode):
    """Names of the operations that would run something on a device.

    A mode of the dispatcher would see them too, after it has imported the compiler: 4 seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ not in NO_LAUNCH:
            self.names.append(func.__name__)
        return func(*args, **kwargs or {})


def test_a_dispatch_is_seven_launches_and_nothing_else(monkeypatch):
    from olmo_ep_comm._triton import moves
    from triton.runtime.jit import JITFunction

    launched: list[str] = []

    def record(self: JITFunction, *args: Any, **options: Any) -> None:
        launched.append(self.fn.__name__)

    form = make_form(
        num_ranks=1,
        num_experts=4,
        max_tokens=16,
        width=8,
        top_k=2,
        dtype=torch.bfloat16,
        capacity=None,
        admit=None,
        live_forwards=2,
        codec=None,
        backward_codec=None,
        combine_by="get",
    )
    settings = Settings(form=form, admit=None, codec=None, backward_codec=None, moves=moves)
    buffers = Buffers(settings, InProcessMemory(1, torch.device("cpu")))
    buffers.counts.own[0].zero_()
    monkeypatch.setattr(buffers.faults, "raise_any", lambda: None)  # of a CPU only
    monkeypatch.setattr(JITFunction, "run", record)
    ids = torch.zeros(16, 2, dtype=torch.int64)
    exchange = RowwiseExchange(buffers, [ids])
    tokens, weights = [torch.ones(16, 8).bfloat16()], [torch.ones(16, 2)]
    with _Operations() as operations:
        exchange.send_tokens(tokens, weights)
    assert operations.names == []
    assert launched == [
        *("count_kernel", "put_counts_kernel"),
        *("place_experts_kernel", "put_plan_kernel", "put_rows_kernel"),
        *("take_meta_kernel", "fan_out_kernel"),
    ]
    with _Operations() as operations:
        tokens[0].clone()  # what it would see
    assert operations.names == ["clone"]
