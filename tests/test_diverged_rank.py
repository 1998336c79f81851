"""A NaN in one expert's gradient on one rank: all stop or skip, and nobody has changed a bit."""

import math
from typing import Any

import pytest
import torch
from olmo_trainer.build import assemble
from olmo_trainer.checkpoint import state_of
from olmo_trainer.config import LayoutConfig, SkipGuard, StopGuard
from olmo_trainer.data import Batch
from olmo_trainer.mesh import create_mesh
from olmo_trainer.recipes import nano
from olmo_trainer.step import NonFiniteError, accumulate_gradients, check_update, update


def _snapshot(assembly: Any) -> dict[str, torch.Tensor]:
    state = {
        name: getattr(each, "local", each).clone() for name, each in state_of(assembly).items()
    }
    return state | {name: each.detach().clone() for name, each in assembly.parameters}


def _step(rank: int, world: int, layout: tuple[int, int, int], poison: float, skips: bool) -> str:
    data, expert, pipeline = layout
    config = nano().model_copy(
        update={
            "layout": LayoutConfig(data=data, expert=expert, pipeline=pipeline),
            "guard": SkipGuard() if skips else StopGuard(),
        }
    )
    config = config.for_world(world)
    assembly = assemble(config, create_mesh(config.layout, torch.device("cpu")))
    tokens = torch.randint(0, 257, (2, 17), generator=torch.Generator().manual_seed(rank))
    mask = torch.ones(2, 16, dtype=torch.bool)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask)
    before = _snapshot(assembly)
    accumulate_gradients(assembly, [batch])
    if rank == world - 1:
        gradients = dict(assembly.parameters)
        gradients["layers.3.feed_forward.experts.w_down_EDH"].main_grad[0, 0, 0] += poison
    try:
        updated = update(assembly, 1, 1e-3)
        skipped = check_update(assembly, 1, float(updated.norm), updated.verdict.tolist())
        answer = f"skipped {skipped.total}: {skipped.reasons}" if skipped.reasons else "updated"
    except NonFiniteError as error:
        answer = str(error)
    after = _snapshot(assembly)
    kept = [
        torch.equal(tensor, after[name])
        for name, tensor in before.items()
        if not name.startswith("guard.")
    ]
    assert not any(kept) if answer == "updated" else all(kept)
    return answer


@pytest.mark.dist
@pytest.mark.parametrize("layout", [(2, 2, 1), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf, 0.0], ids=str)
@pytest.mark.parametrize("skips", [False, True], ids=["stop", "skip"])
def test_all_ranks_agree(processes, layout, poison, skips):
    # Layouts in which the last rank alone holds the poisoned expert.
    answers = processes.run(_step, layout, poison, skips, world=2)
    if poison == 0.0:
        assert set(answers) == {"updated"}
    elif skips:
        assert set(answers) == {"skipped 1: ('norm not finite',)"}
    else:
        assert all("step 1: the gradient norm is" in answer for answer in answers)
        assert all("nothing was updated" in answer for answer in answers)
