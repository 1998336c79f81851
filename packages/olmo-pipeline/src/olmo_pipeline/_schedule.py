"""A pipeline schedule as plain data: for every rank, the list of actions it performs, in order.

The model is cut into `num_stages` consecutive stages; stage `s` lives on rank `rank_of_stage[s]`,
and a rank may hold several (its *chunks*). A batch is cut into microbatches. One action is the
forward or the backward of one stage on one microbatch, written `F2.5` or `B2.5` (stage 2,
microbatch 5). Data flows

    F0.i -> F1.i -> ... -> F(S-1).i -> B(S-1).i -> ... -> B1.i -> B0.i

A backward may be split: `I2.5` computes the gradient of the stage's input, which is all that stage
1 waits for, and `W2.5` the gradients of its weights, at any later time. `B` is `I` and `W` at once;
each stage and microbatch has either the one or the two.

Everything else about a pipeline (who sends what to whom, when memory is free, how long it takes)
follows from the lists. So the lists are all that a schedule is: print it, edit it, save it as text.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward", "input_gradient", "weight_gradient"]
_LETTER: dict[str, str] = {
    "forward": "F",
    "backward": "B",
    "input_gradient": "I",
    "weight_gradient": "W",
}
_KIND: dict[str, Kind] = {
    "F": "forward",
    "B": "backward",
    "I": "input_gradient",
    "W": "weight_gradient",
}


@dataclass(frozen=True, slots=True)
class Action:
    """The forward, the backward or one half of the backward of one stage on one microbatch.

    Args:
        kind: `"forward"`; `"backward"` (the whole backward: input and weight gradients);
            `"input_gradient"` or `"weight_gradient"` (the halves of a split backward).
        stage: Global stage index, in [0, num_stages).
        microbatch: Index in the batch, in [0, num_microbatches).

    Raises:
        ValueError: If `kind` is another word or an index is negative.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __post_init__(self) -> None:
        if self.kind not in _LETTER:
            raise ValueError(f"`kind` must be one of {list(_LETTER)}, got {self.kind!r}.")
        if self.stage < 0 or self.microbatch < 0:
            raise ValueError(
                f"`stage` and `microbatch` must not be negative, got {self.stage} and "
                f"{self.microbatch}."
            )

    def __str__(self) -> str:
        return f"{_LETTER[self.kind]}{self.stage}.{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read the short form, such as `F2.5`.

        Raises:
            ValueError: If `text` is not one of `F B I W`, a stage, a dot and a microbatch.
        """
        match = re.fullmatch(r"([FBIW])(\d+)\.(\d+)", text, re.ASCII)
        if match is None:
            raise ValueError(f"an action must read like `F2.5`, with F, B, I or W, got {text!r}.")
        return cls(_KIND[match[1]], int(match[2]), int(match[3]))


def source_of(action: Action, num_stages: int) -> Action | None:
    """Return the action whose output `action` takes in, or None where the pipeline begins.

    A backward of the last stage takes in no gradient: it begins with the loss of its own forward. A
    gradient goes by the name of the whole backward, whichever of `B` and `I` computes it (see
    `results_of`). A weight gradient takes in nothing from another stage.
    """
    if action.kind == "weight_gradient":
        return None
    if action.kind == "forward":
        return Action("forward", action.stage - 1, action.microbatch) if action.stage > 0 else None
    stage = action.stage + 1
    return Action("backward", stage, action.microbatch) if stage < num_stages else None


def needs_of(action: Action, num_stages: int) -> Iterator[Action]:
    """Yield the results (see `results_of`) that must be there before `action` begins."""
    if action.kind == "weight_gradient":
        yield Action("input_gradient", action.stage, action.microbatch)
        return
    if action.kind != "forward":
        yield Action("forward", action.stage, action.microbatch)
    source = source_of(action, num_stages)
    if source is not None:
        yield source


def results_of(action: Action) -> tuple[Action, ...]:
    """Return the names under which others may need what `action` computes.

    An input gradient is what a whole backward would have sent, so it counts as one as well.
    """
    if action.kind == "input_gradient":
        return action, Action("backward", action.stage, action.microbatch)
    return (action,)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every rank, in order.

    Building one checks its form only. `validate` proves that it can run.

    Args:
        num_ranks: Ranks of the pipeline, at least 1.
        num_stages: Stages over all ranks, at least 1.
        num_microbatches: Microbatches of one run, at least 1.
        actions: One tuple of actions per rank.
        rank_of_stage: The rank that holds each stage, `num_stages` entries in [0, num_ranks).
        name: What to call it, one line.

    Raises:
        TypeError: If a size or an index is no whole number, or `actions` hold something else than
            rows of `Action`.
        ValueError: If a size is below 1, a tuple has another length, a stage lies on no rank, or
            the name has a line break or blanks around it.
    """

    num_ranks: int
    num_stages: int
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    rank_of_stage: tuple[int, ...]
    name: str

    def __post_init__(self) -> None:
        self._check_types()
        # Lists from a caller become tuples: equal schedules compare equal and can be keys.
        object.__setattr__(self, "actions", tuple(map(tuple, self.actions)))
        object.__setattr__(self, "rank_of_stage", tuple(self.rank_of_stage))
        for size in ("num_ranks", "num_stages", "num_microbatches"):
            if getattr(self, size) < 1:
                raise ValueError(f"`{size}` must be at least 1, got {getattr(self, size)}.")
        if len(self.actions) != self.num_ranks:
            raise ValueError(
                f"`actions` must hold one tuple per rank ({self.num_ranks}), got "
                f"{len(self.actions)}."
            )
        if len(self.rank_of_stage) != self.num_stages:
            raise ValueError(
                f"`rank_of_stage` must hold one rank per stage ({self.num_stages}), got "
                f"{len(self.rank_of_stage)}."
            )
        for stage, rank in enumerate(self.rank_of_stage):
            if not 0 <= rank < self.num_ranks:
                raise ValueError(
                    f"`rank_of_stage` must be in [0, {self.num_ranks}), got {rank} for stage "
                    f"{stage}."
                )
        if self.name != self.name.strip() or len(self.name.splitlines()) > 1:
            raise ValueError(
                f"`name` must be one line without blanks around it, got {self.name!r}."
            )

    def _check_types(self) -> None:
        sizes = [self.num_ranks, self.num_stages, self.num_microbatches, *self.rank_of_stage]
        if not all(isinstance(size, int) for size in sizes):
            raise TypeError(
                f"the sizes and `rank_of_stage` of a schedule must be whole numbers, got {sizes}."
            )
        if not isinstance(self.name, str):
            raise TypeError(f"`name` must be text, got {self.name!r}.")
        for action in (action for row in self.actions for action in row):
            if not isinstance(action, Action):
                raise TypeError(
                    f"`actions` must hold rows of `Action`, got {action!r}; `Action.parse` reads "
                    f"the short form."
                )
            if not isinstance(action.stage, int) or not isinstance(action.microbatch, int):
                raise TypeError(
                    f"the stage and microbatch of an action must be whole numbers, got {action}."
                )

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` holds, ascending.

        Raises:
            ValueError: If `rank` is not in [0, num_ranks).
        """
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"`rank` must be in [0, {self.num_ranks}), got {rank}.")
        return tuple(stage for stage, holder in enumerate(self.rank_of_stage) if holder == rank)

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into input and weight gradients."""
        return any(action.kind == "input_gradient" for row in self.actions for action in row)

    @property
    def max_live_per_stage(self) -> tuple[int, ...]:
        """The most activations of each stage that its rank keeps at once.

        An activation is kept from its forward to its backward, or to its weight gradient where the
        backward is split. A pool with so many buffers for each stage never runs dry.
        """
        live, most = [0] * self.num_stages, [0] * self.num_stages
        for action in (action for row in self.actions for action in row):
            if action.kind == "forward":
                live[action.stage] += 1
                most[action.stage] = max(most[action.stage], live[action.stage])
            elif action.kind != "input_gradient":
                live[action.stage] -= 1
        return tuple(most)

    def to_text(self) -> str:
        """Return the schedule as text that a person can read and `from_text` takes back."""
        lines = [
            f"name: {self.name}",
            f"microbatches: {self.num_microbatches}",
            f"rank of stage: {' '.join(map(str, self.rank_of_stage))}",
        ]
        for rank, actions in enumerate(self.actions):
            lines.append(f"rank {rank}: {' '.join(map(str, actions))}")
        return "\n".join(line.rstrip() for line in lines) + "\n"

    def __str__(self) -> str:
        return self.to_text()

    @classmethod
    def from_text(cls, text: str) -> "Schedule":
        """Read what `to_text` wrote. Blank lines are skipped.

        Raises:
            ValueError: If a line is missing, unknown or out of place, or an action cannot be read.
        """
        lines = [line for line in text.splitlines() if line.strip()]
        wanted = ["name", "microbatches", "rank of stage"]
        wanted += [f"rank {rank}" for rank in range(max(1, len(lines) - len(wanted)))]
        values: list[str] = []
        for number, key in enumerate(wanted):
            line = lines[number] if number < len(lines) else ""
            found, colon, value = line.partition(":")
            if found.strip() != key or not colon:
                raise ValueError(
                    f"line {number + 1} of a schedule must begin with `{key}:`, got {line!r}."
                )
            values.append(value.strip())
        name, microbatches, rank_of_stage, *ranks = values
        holders = tuple(_integer(word, "rank of stage") for word in rank_of_stage.split())
        return cls(
            num_ranks=len(ranks),
            num_stages=len(holders),
            num_microbatches=_integer(microbatches, "microbatches"),
            actions=tuple(tuple(map(Action.parse, words.split())) for words in ranks),
            rank_of_stage=holders,
            name=name,
        )


def _integer(word: str, key: str) -> int:
    if not re.fullmatch(r"\d+", word, re.ASCII):
        raise ValueError(f"`{key}` of a schedule must be whole numbers, got {word!r}.")
    return int(word)
