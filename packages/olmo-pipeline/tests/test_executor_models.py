"""Whole models over gloo: tied embeddings, recompute, losses weighted by tokens."""

import pytest
import torch
import torch.distributed as dist
from olmo_pipeline import (
    PipelineExecutor,
    TiedParameter,
    dual_pipe_v,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    search,
    v_shape,
    zero_bubble,
)
from torch import nn
from torch.nn import functional as F

F64 = torch.float64
WIDTH, VOCABULARY = 6, 11
pytestmark = pytest.mark.dist


class _Recompute(torch.autograd.Function):
    """Run `function` again in the backward, as torch's reentrant checkpoint does.

    (torch's own imports its compiler, seconds in each process; `test_split_backward.py` has it.)
    """

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        torch.autograd.backward(output, gradient)
        return None, x.grad


class Layer(nn.Module):
    def __init__(self, *, recompute):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=F64)
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH, dtype=F64)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False, dtype=F64)
        self.router = nn.Linear(WIDTH, 4, bias=False, dtype=F64)
        self.recompute = recompute

    def _mix(self, x):
        query, key, value = self.inputs(self.norm(x)).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True))

    def forward(self, x):
        x = _Recompute.apply(self._mix, x) if self.recompute else self._mix(x)
        return x, self.router(x).logsumexp(-1).square().sum()


class Stage(nn.Module):
    """A layer, with the embedding before the first one and the head and loss after the last one.

    Every loss is divided by the tokens of the whole batch, which the caller knows.
    """

    def __init__(self, stage, num_stages):
        super().__init__()
        torch.manual_seed(stage)
        self.layer = Layer(recompute=stage % 2 == 1)
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        if self.is_first or self.is_last:
            torch.manual_seed(99)  # equal copies
            self.table = nn.Parameter(torch.randn(VOCABULARY, WIDTH, dtype=F64) / 2)

    def forward(self, hidden, microbatch):
        tokens, num_tokens = microbatch
        hidden = F.embedding(tokens, self.table) if hidden is None else hidden
        hidden, z_loss = self.layer(hidden)
        auxiliary = 0.01 * z_loss / num_tokens
        if not self.is_last:
            return hidden, auxiliary
        logits = F.linear(hidden, self.table)
        return F.cross_entropy(logits, tokens.roll(-1), reduction="sum") / num_tokens, auxiliary


def _model(num_stages):
    stages = [Stage(s, num_stages) for s in range(num_stages)]
    stages[-1].table = stages[0].table  # one parameter
    return stages


def _batch(seed, lengths):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    return [(torch.randint(VOCABULARY, (n,), generator=generator), total) for n in lengths]


def _step(stages, batch):
    """One process, one graph for each microbatch."""
    total = 0.0
    for microbatch in batch:
        hidden, auxiliaries = None, 0.0
        for stage in stages:
            hidden, auxiliary = stage(hidden, microbatch)
            auxiliaries = auxiliaries + auxiliary
        (hidden + auxiliaries).backward()
        total += hidden.item()
    return total


def _shape(microbatch):
    return (len(microbatch[0]), WIDTH)


def _train_as_one_process(rank, world, schedule, lengths):
    reference = _model(schedule.num_stages)
    stages = {s: Stage(s, schedule.num_stages) for s in schedule.stages_of(rank)}
    last = schedule.num_stages - 1
    if 0 in stages and last in stages:
        stages[last].table = stages[0].table
    copies = {s: stages[s].table for s in (0, last) if s in stages}
    tied = TiedParameter(schedule, copies, device="cpu")
    executor = PipelineExecutor(schedule, stages, device="cpu", dtype=F64)
    losses = []
    for step in range(5):
        batches = [_batch(2 * step + call, lengths[call:] + lengths[:call]) for call in (0, 1)]
        loss = 0.0
        for batch in batches:  # accumulation over two calls, lengths differ
            loss += sum(x.item() for x in executor.run(batch, activation_shape=_shape).losses)
        tied.sum_gradients()
        expected = sum(_step(reference, batch) for batch in batches)
        if rank == schedule.rank_of_stage[-1]:
            assert loss == pytest.approx(expected, rel=1e-12)
        for s, stage in stages.items():
            wanted = dict(reference[s].named_parameters())
            for name, parameter in stage.named_parameters():
                ratio = (parameter.grad.norm() / wanted[name].grad.norm()).item()
                assert ratio == pytest.approx(1, abs=1e-10), f"stage {s} {name}: ratio {ratio}"
                torch.testing.assert_close(parameter.grad, wanted[name].grad)
        norms = torch.zeros((), dtype=F64)
        own = {id(p): p for stage in stages.values() for p in stage.parameters()}
        for parameter in own.values():
            if tied.is_owner or all(parameter is not each for each in copies.values()):
                norms += parameter.grad.square().sum()
        dist.all_reduce(norms)
        everything = {id(p): p for stage in reference for p in stage.parameters()}
        torch.testing.assert_close(norms, sum(p.grad.square().sum() for p in everything.values()))
        for parameter in (*own.values(), *everything.values()):
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None
        losses.append(loss)
    table = [p.tolist() for p in copies.values()]
    tied.close()
    executor.close()
    return table


def _schedules(num_ranks, count):
    return [
        gpipe(num_ranks, count),
        one_f_one_b(num_ranks, count),
        interleaved_one_f_one_b(num_ranks, count, 2),
        v_shape(num_ranks, count),
        zero_bubble(num_ranks, count, "h1"),
        zero_bubble(num_ranks, count, "v"),
        dual_pipe_v(num_ranks, count),
        search(num_ranks, count, memory_cap=num_ranks + 1, tries=2),
        search(num_ranks, count, memory_cap=num_ranks + 1, split_backward=True, tries=2),
    ]


def _train_all(rank, world):
    return [_train_as_one_process(rank, world, s, [3, 5, 1, 4]) for s in _schedules(world, 4)]


@pytest.mark.parametrize("world", [2, 4])
def test_a_model_trains_as_in_one_process(processes, world):
    tables_of_ranks = processes.run(_train_all, world=world)
    for number, schedule in enumerate(_schedules(world, 4)):
        tables = [table for tables in tables_of_ranks for table in tables[number]]
        assert len(tables) == 2, "one copy for each end"
        assert tables[0] == tables[1], f"copies differ bit for bit under {schedule.name}"


def _save_tied(rank, world, folder):
    """Save with one copy of the tied table, whoever holds copies, and load into one process."""
    from torch.distributed import checkpoint

    schedules = [one_f_one_b(world, 1), v_shape(world, 1), zero_bubble(world, 1, "h1")]
    for number, schedule in enumerate(schedules):
        last = schedule.num_stages - 1
        stages = {s: Stage(s, schedule.num_stages) for s in schedule.stages_of(rank)}
        if 0 in stages and last in stages:
            stages[last].table = stages[0].table
        copies = {s: stages[s].table for s in (0, last) if s in stages}
        tied = TiedParameter(schedule, copies, device="cpu")
        with torch.no_grad():
            for copy in copies.values():
                copy.fill_(5.0 if tied.is_owner else -1.0)  # only the owner's may be saved
        state = {
            f"{s}.{name}": value
            for s, stage in stages.items()
            for name, value in stage.state_dict().items()
            if name != "table"
        }
        if copies and tied.is_owner:
            state["table"] = copies[min(copies)].detach()
        path = f"{folder}/{number}"
        # One writer a key: a second copy under the same name would be dropped without a word.
        owners = [None] * world
        dist.all_gather_object(owners, sorted(state))
        assert sum("table" in keys for keys in owners) == 1, schedule.name
        checkpoint.save(state, checkpoint_id=path)
        tied.close()
        if rank == 0:
            _load_tied(checkpoint, path, schedule.num_stages)
        dist.barrier()


def _load_tied(checkpoint, path, num_stages):
    model, expected = _model(num_stages), _model(num_stages)
    keys = checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
    assert [key for key in keys if "table" in key] == ["table"]
    state = {"table": torch.zeros_like(model[0].table)}
    for s, stage in enumerate(model):
        for name, value in stage.state_dict().items():
            if name != "table":
                state[f"{s}.{name}"] = torch.zeros_like(value)
    assert state.keys() == keys.keys()
    checkpoint.load(state, checkpoint_id=path, no_dist=True)
    assert (state["table"] == 5.0).all()
    for s, stage in enumerate(expected):
        for name, value in stage.state_dict().items():
            if name != "table":
                assert torch.equal(state[f"{s}.{name}"], value), f"stage {s} {name}"


@pytest.mark.parametrize("world", [2, 3])
def test_a_tied_table_is_once_in_the_checkpoint(processes, world, tmp_path):
    processes.run(_save_tied, str(tmp_path), world=world)


def _tie_two_replicas(rank, world):
    """Two pipelines of two ranks: gradients 1, 2 of the embedding, 4, 8 of the head."""
    pipelines = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    replica, stage = divmod(rank, 2)
    parameter = nn.Parameter(torch.zeros(3, dtype=F64))
    tied = TiedParameter(
        one_f_one_b(2, 1), {stage: parameter}, group=pipelines[replica], device="cpu"
    )
    parameter.grad = torch.full((3,), float([[1, 4], [2, 8]][replica][stage]), dtype=F64)
    buffer = parameter.grad
    tied.sum_gradients()
    assert parameter.grad is buffer, "a gradient that others hold stays where it is"
    dist.all_reduce(parameter.grad, group=replicas[stage])
    return (parameter.grad / 2).tolist()


def test_the_tie_comes_before_the_reduction_over_replicas(processes):
    assert processes.run(_tie_two_replicas, world=4) == [[7.5] * 3] * 4


def _tie_wrongly(rank, world):
    schedule = v_shape(2, 1)
    messages = []
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    wrong = [{0: one, 3: other}, {0: one}] if rank == 0 else [{}, {1: one}]
    for copies in wrong:
        with pytest.raises(ValueError, match="must") as caught:
            TiedParameter(schedule, copies, device="cpu")
        messages.append(str(caught.value))
    with pytest.raises(ValueError, match="one shape and dtype"):
        TiedParameter(one_f_one_b(2, 1), {rank: nn.Parameter(torch.zeros(2 + rank))}, device="cpu")
    # A copy without a gradient counts as zero and gets the sum.
    tied = TiedParameter(one_f_one_b(2, 1), {rank: one}, device="cpu")
    if rank == 1:
        one.grad = torch.tensor([1.0, 2.0])
    tied.sum_gradients()
    assert one.grad.tolist() == [1.0, 2.0]
    return messages


def test_wrong_copies_are_named(processes):
    first, second = processes.run(_tie_wrongly, world=2)
    assert first[0].startswith("stages [0, 3] of rank 0 must share one parameter, got different")
    assert first[1] == "`copies` of rank 0 must be those of stages [0, 3], got [0]."
    assert "rank(s) [0] refused theirs" in second[0]
    assert second[1] == "`copies` of rank 1 must be those of stages [], got [1]."


def test_one_rank_needs_no_process_group():
    parameter = nn.Parameter(torch.zeros(2))
    tied = TiedParameter(zero_bubble(1, 1, "v"), {0: parameter, 1: parameter}, device="cpu")
    parameter.grad = torch.ones(2)
    tied.sum_gradients()
    assert parameter.grad.tolist() == [1.0, 1.0]
    assert tied.is_owner
