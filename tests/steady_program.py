"""The program, but that torch lets nothing wait for the device in a step that is steady.

A steady step is launched after two others and is not the last one; it and the one before it, which
is read behind it, run under `torch.cuda.set_sync_debug_mode("error")`.
"""

import sys
from typing import Any

import torch
from olmo_trainer import cli, loop

STEADY = "steady steps without a wait:"


def main() -> int:
    """Run the command line; say at its end how many steps were steady."""
    launch, read_steps = loop._Run._launch, loop._Run._read_steps
    count = 0

    def strictly(run: loop._Run, step: int, method: Any, *arguments: Any) -> Any:
        is_steady = 2 < step < run.config.steps
        torch.cuda.set_sync_debug_mode("error" if is_steady else "default")
        try:
            return method(run, step, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def strict_launch(run: loop._Run, step: int, *arguments: Any) -> Any:
        nonlocal count
        count += 2 < step < run.config.steps
        return strictly(run, step, launch, *arguments)

    loop._Run._launch = strict_launch
    loop._Run._read_steps = lambda run, step, *rest: strictly(run, step, read_steps, *rest)
    code = cli.main(sys.argv[1:])
    sys.stdout.write(f"{STEADY} {count}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
