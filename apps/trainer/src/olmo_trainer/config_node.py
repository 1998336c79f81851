"""The base of every node of the configuration tree."""

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Config(BaseModel):
    """Base of every node: immutable, no unknown keys, defaults checked too."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # a folder named 2024
    )


def _split_words(value: object) -> object:
    if isinstance(value, int):  # one number, which was read as JSON
        return [value]
    return [word for word in value.split(",") if word] if isinstance(value, str) else value


SplitWords = BeforeValidator(_split_words)
"""Lets a tuple be written on the command line as words between commas."""
