"""Which rank of a pipeline this process is."""

import torch.distributed as dist


def rank_in(group: dist.ProcessGroup | None, num_ranks: int) -> int:
    """Return this process's rank in the pipeline.

    Args:
        group: The ranks of the pipeline in pipeline order; None for all processes.
        num_ranks: Ranks of the schedule.

    Raises:
        ValueError: If the group has another size than the schedule.
        RuntimeError: If several ranks are asked for and torch.distributed is not initialised.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if num_ranks > 1:
            raise RuntimeError(
                f"a schedule of {num_ranks} ranks needs torch.distributed; call "
                f"`torch.distributed.init_process_group` first."
            )
        return 0
    if group is None and num_ranks == 1:
        return 0
    size = dist.get_world_size(group)
    if size != num_ranks:
        raise ValueError(
            f"`group` must have {num_ranks} ranks, as many as the schedule has, got {size}."
        )
    return dist.get_rank(group)
