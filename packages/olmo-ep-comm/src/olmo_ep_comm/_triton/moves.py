# pyright: reportArgumentType=false, reportCallIssue=false
"""What is written where: the functions of `olmo_ep_comm._rowwise.moves` as kernel launches.

They do the same, bit for bit, without reading the device: the number of rows stays a tensor, and
the programs of a kernel share as many rows as there are.
"""

import torch
import triton
from torch import Tensor

from olmo_ep_comm._rowwise.memory import Shared, Stack
from olmo_ep_comm._rowwise.plan import SourcePlan
from olmo_ep_comm._rowwise.sizes import Form

from . import row_kernels as rows
from . import word_kernels as words
from .plan import put_plan as put_plan
from .plan import put_requests as put_requests

LINK_PROGRAMS = 132
"""Programs that write into peers: one for each multiprocessor of an H200, where two and four for
each were no faster."""
FETCH_PROGRAMS = 264
"""Programs that read from peers. A read waits for its answer, where a write does not: of 132, 264
and 528 programs between two H200s, the second fetched 8 % more a second than the first, and the
third no more."""
LOCAL_PROGRAMS = 1056
"""Programs that work in this rank's own memory. 528 took a fifth to a third longer on an H200, and
2112 only 3 % less."""
_COLUMNS = 2048
"""Most words or values of a row that a program holds at once."""
_ROUTES = 256


def put_rows(peers: Stack, leases_R: Tensor, words_TW: Tensor, plan: SourcePlan) -> None:
    """Write each token once into every rank it goes to: into its head."""
    num_tokens, width = words_TW.shape
    with torch.cuda.device_of(words_TW):
        rows.put_rows_kernel[(LINK_PROGRAMS,)](
            peers.pointers,
            leases_R,
            words_TW,
            plan.rank_TK,
            plan.row_TK,
            plan.sum_TK,
            num_tokens,
            peers.pointers.shape[1],
            leases_R.stride(0),
            W=width,
            K=plan.row_TK.shape[1],
            SLOTS=triton.next_power_of_2(plan.row_TK.shape[1]),
            BLOCK=_block(width),
            num_warps=8,
        )


def take_meta(meta_C4: Tensor, num_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return what each row is, and its weight, in memory that the next dispatch leaves alone."""
    kept_C4 = torch.empty_like(meta_C4)
    weights_C = torch.empty(len(meta_C4), dtype=torch.float32, device=meta_C4.device)
    with torch.cuda.device_of(meta_C4):
        words.take_meta_kernel[(triton.cdiv(len(meta_C4), _ROUTES),)](
            meta_C4, kept_C4, weights_C.view(torch.int32), num_rows, BLOCK=_ROUTES
        )
    return kept_C4, weights_C


def fan_out(words_CW: Tensor, out_CW: Tensor, meta_C4: Tensor, num_rows: Tensor) -> None:
    """Copy each head to the rows of its chain; `out_CW` may be `words_CW` itself."""
    with torch.cuda.device_of(words_CW):
        rows.fan_out_kernel[(LOCAL_PROGRAMS,)](
            words_CW,
            out_CW,
            meta_C4,
            num_rows,
            W=words_CW.shape[1],
            IN_PLACE=out_CW.data_ptr() == words_CW.data_ptr(),
            BLOCK=_block(words_CW.shape[1]),
            num_warps=8,
        )


def put_sums(peers: Shared, y_CD: Tensor, meta_C4: Tensor, num_rows: Tensor, form: Form) -> None:
    """Add the rows of each chain and write the sum to its token's rank."""
    with torch.cuda.device_of(y_CD):
        rows.put_sums_kernel[(LINK_PROGRAMS,)](
            peers.pointers,
            y_CD,
            meta_C4,
            num_rows,
            form.max_tokens * form.top_k,
            D=form.width,
            BLOCK=_block(form.width),
            num_warps=8,
        )


def keep_sums(sums_CD: Tensor, y_CD: Tensor, meta_C4: Tensor, num_rows: Tensor) -> None:
    """Add the rows of each chain and keep the sum here, at the head."""
    width = y_CD.shape[1]
    with torch.cuda.device_of(y_CD):
        rows.keep_sums_kernel[(LOCAL_PROGRAMS,)](
            sums_CD, y_CD, meta_C4, num_rows, D=width, BLOCK=_block(width), num_warps=8
        )


def get_sums(peers: Shared, plan: SourcePlan, form: Form) -> Tensor:
    """Return (T, D): the sums of each token, fetched from where `keep_sums` kept them."""
    num_tokens, own = len(plan.row_TK), peers.own[0]
    y_TD = torch.empty(num_tokens, form.width, dtype=own.dtype, device=own.device)
    with torch.cuda.device_of(y_TD):
        rows.get_sums_kernel[(FETCH_PROGRAMS,)](
            peers.pointers,
            plan.rank_TK,
            plan.row_TK,
            plan.sum_TK,
            y_TD,
            num_tokens,
            K=form.top_k,
            D=form.width,
            BLOCK=_block(form.width),
            num_warps=8,
        )
    return y_TD


def put_weights(
    peers: Shared, values_C: Tensor, meta_C4: Tensor, num_rows: Tensor, form: Form
) -> None:
    """Write the value of each row to the slot that it came from."""
    with torch.cuda.device_of(values_C):
        words.put_values_kernel[(triton.cdiv(form.capacity, _ROUTES),)](
            peers.pointers,
            values_C,
            meta_C4,
            num_rows,
            form.max_tokens * form.top_k,
            BLOCK=_ROUTES,
        )


def add_sums(sums_ND: Tensor, num_sums_T: Tensor, form: Form) -> Tensor:
    """Return (T, D): the sums of each token added in float32, in the order of its slots."""
    y_TD = torch.empty(len(num_sums_T), form.width, dtype=sums_ND.dtype, device=sums_ND.device)
    with torch.cuda.device_of(y_TD):
        rows.add_sums_kernel[(LOCAL_PROGRAMS,)](
            sums_ND,
            num_sums_T,
            y_TD,
            len(num_sums_T),
            F=form.sums_a_token,
            D=form.width,
            BLOCK=_block(form.width),
            num_warps=8,
        )
    return y_TD


def _block(width: int) -> int:
    return min(_COLUMNS, 1 << (width - 1).bit_length())
