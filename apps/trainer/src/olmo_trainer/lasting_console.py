"""Standard output that a run outlives."""

import os
import sys

from rich.console import Console


class LastingConsole(Console):
    """Falls silent when who reads it is gone, as `head` after its lines or a closed terminal.

    A run goes on: its log is a file.
    """

    def on_broken_pipe(self) -> None:
        """Write nothing more; what Python still holds back goes nowhere."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
