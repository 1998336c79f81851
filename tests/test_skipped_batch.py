"""A batch that gives NaN on one rank is left out by all: no bit moves, the log counts it."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_program import ForkedProgram
from olmo_trainer.metrics import StepRecord, read_metrics

BAD_STEP = 3
# What a forward of one rank gives in its last microbatch of one step; and each step's state before
# and after, which an update that is left out may not touch.
SPOILED = """
import json
import torch
from pathlib import Path
from olmo_trainer import loop
from olmo_trainer.checkpoint import state_of
from olmo_trainer.stage import Stage

step, forwards, moved = 0, 0, {{}}
accumulate, update, forward = loop.accumulate_gradients, loop.update, Stage.forward

def count(assembly, batches, **options):
    global step, forwards
    step, forwards = step + 1, 0
    accumulate(assembly, batches, **options)

def spoil(self, hidden, microbatch):
    global forwards
    forwards += torch.is_grad_enabled()
    output, auxiliary = forward(self, hidden, microbatch)
    if rank == {victim} and step == {bad} and forwards == {which}:
        output = output * float("{value}")
        if self.part.is_last:
            self.statistics.vector[0] = output.detach()
    return output, auxiliary

def tensors(assembly):
    state = {{name: getattr(each, "local", each) for name, each in state_of(assembly).items()}}
    state |= {{name: each.detach() for name, each in assembly.parameters}}
    return {{name: each.clone() for name, each in state.items() if not name.startswith("guard.")}}

def watch(assembly, step, rate):
    before = tensors(assembly)
    updated = update(assembly, step, rate)
    after = tensors(assembly)
    moved[step] = [name for name in before if not torch.equal(before[name], after[name])]
    Path("{folder}", f"moved-{{rank}}.json").write_text(json.dumps(moved))
    return updated

loop.accumulate_gradients, loop.update, Stage.forward = count, watch, spoil
loop._Run._conclude = lambda self, heldout, saved: None  # no report
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedProgram]:
    with ForkedProgram(tmp_path_factory.mktemp("output")) as program:
        yield program


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, words = tmp_path_factory.mktemp("texts"), random.Random(0)
    for index in range(12):
        (folder / f"{index}.txt").write_text(" ".join(words.choices(["ab", "cde", "f"], k=150)))
    return folder


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "victim", "value", "settings"),
    [
        # The last stage's loss; the others only see what comes back through the pipeline.
        (4, 3, "nan", ("layout.expert=2", "layout.pipeline=2", "batch.accumulation=2")),
        # Hidden states of the first stage, which go through experts of another rank.
        (4, 0, "inf", ("layout.expert=2", "layout.pipeline=2", "optimizer.kind=muon")),
        (2, 1, "nan", ("layout.expert=2", "layout.dispatcher.kind=rowwise")),
        (2, 1, "nan", ("layout.context=2", "optimizer.kind=muon")),
        (2, 0, "nan", ("layout.data=2", "optimizer.moments=bf16", "batch.accumulation=2")),
    ],
    ids=["loss of a pipeline", "states of a pipeline", "rowwise", "context", "data"],
)
def test_all_ranks_leave_it_out(program, texts, tmp_path, world, victim, value, settings):
    run, which = tmp_path / "run", 2 if "batch.accumulation=2" in settings else 1
    words = (
        *("guard.kind=skip", "run.sample_bytes=0", "run.heldout_every=0", "run.log_every=9"),
        *("run.heldout_sequences=4", "batch.sequences=8", "data.sequence_length=16"),
        *("run.threads=1", "data.source.kind=text_folder", f"data.source.path={texts}"),
        *(f"run.folder={run}", *settings),
    )
    command = ["nano", "--steps", "5", *(part for word in words for part in ("--set", word))]
    before = SPOILED.format(
        victim=victim, bad=BAD_STEP, which=which, value=value, folder=str(tmp_path)
    )
    ranks = program.start_ranks(command, world, before=before)
    assert [program.wait(rank) for rank in ranks] == [0] * world, program.output(ranks[0])
    for rank in range(world):
        moved = json.loads((tmp_path / f"moved-{rank}.json").read_text())
        assert moved[str(BAD_STEP)] == [], (rank, moved[str(BAD_STEP)])
        for step in (1, 2, 4, 5):
            assert "step" in moved[str(step)], (rank, step)
            assert any(name.startswith("main.") for name in moved[str(step)]), (rank, step)
    assert f"step {BAD_STEP} is left out: loss not finite, norm not finite\n" in program.output(
        ranks[0]
    )
    records = read_metrics(run / "metrics.jsonl")
    steps = [each for each in records if isinstance(each, StepRecord)]
    assert [each.skipped for each in steps] == [0, 0, 1, 0, 0]
    assert [each.num_skipped for each in steps] == [0, 0, 1, 1, 1]
    assert [math.isfinite(each.loss) for each in steps] == [True, True, False, True, True]
    assert [math.isfinite(each.grad_norm) for each in steps] == [True, True, False, True, True]
