import pytest
import torch
from olmo_pipeline import PipelineExecutor, dual_pipe_v, zero_bubble


@pytest.mark.parametrize(
    ("schedule", "first"), [(zero_bubble(1, 2), "I0.0"), (dual_pipe_v(1, 2), "I")]
)
def test_a_split_backward_is_refused(schedule, first):
    stages = dict.fromkeys(range(schedule.num_stages))
    message = rf"every backward must be whole to be executed, got {first}.* on rank 0; take"
    with pytest.raises(ValueError, match=message):
        PipelineExecutor(schedule, stages, device="cpu", dtype=torch.float32)
