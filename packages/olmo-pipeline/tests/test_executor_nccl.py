from pathlib import Path

import pytest
import torch
from gpu_ranks import launch


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_schedule_equals_one_process_on_nccl():
    launch(Path(__file__).with_name("nccl_ranks.py"), world=2)
