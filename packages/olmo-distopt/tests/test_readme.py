import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from olmo_distopt import GradientReducer
from torch import nn

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_is_an_example():
    assert BLOCKS


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_example_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def _sums(rank, world, expert_ranks):
    """Over the groups of the README: what the gradient of a dense weight and an expert's become."""
    (block,) = [block for block in BLOCKS if "new_group" in block]
    names: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), names)
    groups = names["make_replica_groups"](expert_ranks)
    dense, expert = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    named = [("up.weight", dense), (f"mlp.experts.{rank % expert_ranks}", expert)]
    reducer = GradientReducer(named, groups)
    ((dense.sum() + expert.sum()) * 10**rank).backward()
    reducer.reduce()
    return dense.main_grad[0].item(), expert.main_grad[0].item()


@pytest.mark.dist
def test_the_groups_sum_experts_over_the_ranks_that_hold_them(processes):
    assert processes.run(_sums, 2, world=4) == [(1111.0, 101.0), (1111.0, 1010.0)] * 2
    assert processes.run(_sums, 4, world=4) == [(1111.0, 10.0**rank) for rank in range(4)]
    assert processes.run(_sums, 1, world=2) == [(11.0, 11.0)] * 2
    assert not dist.is_initialized()
    assert _sums(0, 1, 1) == (1.0, 1.0)
