"""When and how replicas exchange gradients and weights changes no bit of a run."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from forked_program import ForkedProgram
from olmo_trainer.metrics import HeldoutRecord, StepRecord, read_metrics

BUCKET_BYTES = 8_000  # several a rank, each of a few parameters
# Small buckets of tensors that are cut although they are small, and how many reductions had begun
# before the backward ended and how many gathers were still under way when the step did.
WATCHED = """
import json
from functools import partial
from pathlib import Path
from olmo_trainer import build, loop, step

class Reducer(build.GradientReducer):
    def reduce(self, **options):
        seen["reductions"] += self._num_launched
        seen["buckets"] += len(self._buckets)
        super().reduce(**options)

def watch(assembly, number, rate):
    updated = update(assembly, number, rate)
    seen["gathers"] += len(assembly.optimizer._pending)
    Path("FOLDER", f"seen-{rank}.json").write_text(json.dumps(seen))
    return updated

seen, update = {"reductions": 0, "buckets": 0, "gathers": 0}, loop.update
build.GradientReducer = partial(Reducer, bucket_bytes=BYTES, min_shard_numel=4)
build.ShardedAdamW = partial(build.ShardedAdamW, bucket_bytes=BYTES, min_shard_numel=4)
build.ShardedMuon = partial(build.ShardedMuon, bucket_bytes=BYTES, min_shard_numel=4)
loop.update = watch
loop._Run._conclude = lambda self, heldout, saved: None  # no report
"""
IN_BACKWARD = ("optimizer.replicas.reduce=in_backward",)
IN_FORWARD = ("optimizer.replicas.gather=in_forward",)
SCATTER = ("optimizer.replicas.collective=reduce_scatter",)
ALL = (*IN_BACKWARD, *IN_FORWARD, *SCATTER)
PIPELINE = ("layout.pipeline=2", "batch.accumulation=4")
MXFP8 = ("precision.mxfp8=experts,shared,attention", "model.attention.num_kv_heads=2")


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


def _history(run: Path) -> list[StepRecord | HeldoutRecord]:
    """Return all numbers but the clock's."""
    clock = {
        StepRecord: {"tokens_per_second": 0.0, "phase_seconds": {}, "flops_per_second": None},
        HeldoutRecord: {},
    }
    records = read_metrics(run / "metrics.jsonl")
    return [replace(e, seconds=0.0, **clock[type(e)]) for e in records if type(e) in clock]


def _checkpoints(run: Path) -> dict[str, bytes]:
    files = (run / "checkpoints").rglob("*.safetensors")
    return {str(file.relative_to(run)): file.read_bytes() for file in files}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "settings", "choices"),
    [
        (2, ("batch.accumulation=2",), (IN_BACKWARD, IN_FORWARD, SCATTER, ALL)),
        (2, ("layout.expert=2", "layout.dispatcher.kind=rowwise", "recompute.kind=blocks"), (ALL,)),
        (2, ("optimizer.kind=muon", "guard.kind=skip"), ((*IN_BACKWARD, *IN_FORWARD),)),
        (4, ("layout.schedule.kind=interleaved", "layout.expert=2", *PIPELINE), (ALL,)),
        (4, ("layout.schedule.kind=zero_bubble_v", *PIPELINE), (ALL,)),
        (4, ("layout.schedule.kind=zero_bubble_h1", *PIPELINE, *MXFP8), (ALL,)),
    ],
    ids=["data", "experts", "muon", "chunks", "split backward", "split backward of MXFP8"],
)
def test_no_bit_changes(program, texts, tmp_path, world, settings, choices):
    def run(name: str, choice: tuple[str, ...]) -> Path:
        folder = tmp_path / name
        words = (
            *("run.sample_bytes=0", "run.heldout_every=2", "run.log_every=9", "run.save_every=2"),
            *("run.heldout_sequences=8", "batch.sequences=8", "data.sequence_length=16"),
            *("run.threads=1", "data.source.kind=text_folder", f"data.source.path={texts}"),
            *(f"run.folder={folder}", *settings, *choice),
        )
        command = ["nano", "--steps", "5", *(part for word in words for part in ("--set", word))]
        ranks = program.start_ranks(command, world, before=watched)
        assert [program.wait(rank) for rank in ranks] == [0] * world, program.output(ranks[0])
        return folder

    watched = WATCHED.replace("FOLDER", str(tmp_path)).replace("BYTES", str(BUCKET_BYTES))
    plain = run("plain", ())
    for number, choice in enumerate(choices):
        chosen = run(str(number), choice)
        assert _history(chosen) == _history(plain), choice
        assert _checkpoints(chosen) == _checkpoints(plain), choice
        for rank in range(world):
            seen = json.loads((tmp_path / f"seen-{rank}.json").read_text())
            assert seen["buckets"] > 5 * 2
            expected = seen["buckets"] if IN_BACKWARD[0] in choice else 0
            assert seen["reductions"] == expected, (choice, seen)
            assert (seen["gathers"] > 0) == (IN_FORWARD[0] in choice), (choice, seen)
