"""The trainer: composes the olmo packages into one training program."""

__version__ = "0.1.0"
