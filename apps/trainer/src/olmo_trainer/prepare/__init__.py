"""Text to token files: `prepare` reads, tokenizes in several processes, and writes a manifest.

    inputs -> texts, in order -> chunks -> worker processes -> ids, in order -> files + manifest

The files hold the same bytes whatever the number of workers, and wherever a run was stopped.
"""

from olmo_trainer.prepare.run import PrepareOptions as PrepareOptions
from olmo_trainer.prepare.run import prepare as prepare

__all__ = ["PrepareOptions", "prepare"]
