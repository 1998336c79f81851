"""The base of every node of the configuration tree."""

from pydantic import BaseModel, ConfigDict, ValidatorFunctionWrapHandler, WrapValidator


class Config(BaseModel):
    """Base of every node: immutable, no unknown keys, defaults checked too."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # a folder named 2024
    )


def _split(value: object) -> object:
    if isinstance(value, int):  # one number, which was read as JSON
        return [value]
    return [word for word in value.split(",") if word] if isinstance(value, str) else value


def _split_words(value: object, check: ValidatorFunctionWrapHandler) -> object:
    words = check(_split(value))
    twice = [word for index, word in enumerate(words) if word in words[:index]]
    if twice:
        raise ValueError(f"must name each once, got {twice[0]!r} twice")
    return words


SplitWords = WrapValidator(_split_words)
"""Lets a tuple be written on the command line as words between commas, each of them once."""
