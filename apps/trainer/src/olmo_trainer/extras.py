"""How to install what this app does not need at all times."""

from typing import Literal

Extra = Literal["hugging-face", "prepare", "tensorboard", "wandb"]


def install_command(extra: Extra) -> str:
    """Return the command, for the repository's root, that adds an extra to what is installed.

    `--package`, because the extras are the app's and not the root's; `--inexact`, because what
    other extras brought stays. `uv run` leaves it there.
    """
    return f"`uv sync --inexact --package olmo-trainer --extra {extra}`"
