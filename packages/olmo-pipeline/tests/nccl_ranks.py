"""What each rank of `test_executor_nccl.py` runs: torchrun --nproc-per-node 2 nccl_ranks.py."""

import os
import threading

import torch
import torch.distributed as dist
from olmo_pipeline import (
    PipelineExecutor,
    dual_pipe_v,
    interleaved_one_f_one_b,
    v_shape,
    zero_bubble,
)
from torch.utils.checkpoint import checkpoint

F64 = torch.float64
WIDTH = 256


def _stage(weight, is_last, *, recompute=False):
    def change_of(hidden):
        return torch.tanh(hidden @ weight)

    def rerun(hidden):  # in a thread of autograd's own
        return checkpoint(change_of, hidden, use_reentrant=False, preserve_rng_state=False)

    def call(hidden, microbatch):
        hidden = microbatch.to(weight.device) if hidden is None else hidden
        change = rerun(hidden) if recompute else change_of(hidden)
        output = hidden + change
        metrics = {"largest": change.detach().abs().amax(0) if len(change) else change.detach()}
        return (output**2).sum() if is_last else output, (change**2).sum(), metrics

    return call


def _check_first_use(rank, world):
    """A first run whose forward loads kernels that nothing has used before must not hang."""

    def call(hidden, microbatch):
        hidden = microbatch.cuda() if hidden is None else hidden
        output = torch.special.erfcx(torch.sort(hidden).values.cumsum(-1).sinh().lgamma())
        return output.logcumsumexp(-1).mean() if rank == world - 1 else output, None

    schedule = interleaved_one_f_one_b(world, 4, 1)
    stage = {rank: call}
    executor = PipelineExecutor(schedule, stage, device="cuda", dtype=F64)
    batch = [torch.rand(64, 64, dtype=F64, requires_grad=True) for _ in range(4)]
    executor.run(batch, activation_shape=(64, 64))
    torch.cuda.synchronize()
    executor.close()


def _schedules(num_ranks):
    for count in (1, 3, 8):
        yield from (interleaved_one_f_one_b(num_ranks, count, chunks) for chunks in (1, 2, 3))
        yield v_shape(num_ranks, count)
        yield from (zero_bubble(num_ranks, count, kind) for kind in ("h1", "v"))
        yield dual_pipe_v(num_ranks, count)


def _check(rank, schedule):
    num_microbatches = schedule.num_microbatches
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randn(n, WIDTH, generator=generator, dtype=F64) / 16  # noqa: E731
    values = [draw(WIDTH) for _ in range(schedule.num_stages)]
    # Up to 8 MB a message, far beyond what NCCL could keep under way; one without elements.
    batch = [draw((i * 1361) % 4096).cuda() for i in range(num_microbatches)]
    weights = {s: torch.nn.Parameter(values[s].cuda()) for s in schedule.stages_of(rank)}
    last = schedule.num_stages - 1
    stages = {s: _stage(w, s == last, recompute=s % 2 == 1) for s, w in weights.items()}
    executor = PipelineExecutor(schedule, stages, device="cuda", dtype=F64)
    executor.evaluate(batch, activation_shape=lambda x: x.shape)
    executor.run(batch, activation_shape=lambda x: x.shape)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # a run never waits for the device
    result = executor.run(batch, activation_shape=lambda x: x.shape)
    torch.cuda.set_sync_debug_mode("default")
    executor.close()  # what the run has issued still ends

    copies = [value.cuda().requires_grad_() for value in values]
    for index, microbatch in enumerate(batch):
        hidden, total = microbatch, torch.zeros((), device="cuda", dtype=F64)
        for stage, weight in enumerate(copies):
            hidden, auxiliary, metrics = _stage(weight, stage == last)(hidden, microbatch)
            if stage in weights:
                kept = result.metrics[stage, index]
                torch.testing.assert_close(kept["largest"], metrics["largest"])
            total = total + auxiliary
        (hidden + total).backward()
        if rank == schedule.rank_of_stage[last]:
            torch.testing.assert_close(result.losses[index], hidden.detach())
    for stage, weight in weights.items():
        torch.testing.assert_close(weight.grad, 2 * copies[stage].grad, rtol=1e-9, atol=1e-9)


def main():
    """Compare every schedule with one process."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    watchdog = threading.Timer(240, os._exit, [3])
    watchdog.daemon = True
    watchdog.start()
    dist.init_process_group("nccl")
    _check_first_use(rank, world)  # before anything has loaded a kernel
    for schedule in _schedules(world):
        _check(rank, schedule)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
