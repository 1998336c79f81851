"""Split backward: linear operations whose weight gradients are computed later than the rest.

While a stage runs forward, a `Deferring` mode sees every call of a torch function or operator. A
call that a rule knows (`_split_rules`), with parameters among its arguments, is replaced by an
autograd function with the same result and another backward: it returns the gradient of the input
and leaves the weight gradients, with what they need, on a tape. Everything else of the stage
(norms, embeddings, activations) has its whole backward at once. So

    I = the whole backward of the stage without what is left on the tape,    W = the tape

and no weight is counted in both, however often and wherever it is used.

A layer with an autograd function of its own (quantised or fused experts) leaves its weight
gradients on the same tape, if it asks in its forward (`Splitter.defer`).

The graph has no edge to a deferred weight, so its hooks see nothing at I and one gradient at W.
(A backward that returns None for a weight would not do: torch runs the hooks of that, too.)

Some weights stay whole, because a second half cannot be told apart: one that is not itself an
`nn.Parameter` (a cast, a transpose, a view of one), and those of calls inside a compiled graph, an
autograd function that does not ask, a `torch.func` transform or a composite function of torch
(`multi_head_attention_forward`), or on tensor subclasses. Their gradients are computed at I, which
is always right and only less even; a warning names them (`_whole_weights`).

Recompute works because autograd carries the mode into its threads: a recompute in a backward under
the same mode calls the same functions, so it saves the same tensors. Layers that ask are told the
same both times.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from ._schedule import Action, Schedule
from ._split_rules import TORCH_RULES, SplitRule, positional
from ._whole_weights import names_of, whole_weights

_BACKWARDS = (torch.autograd.backward, Tensor.backward)


Compute = Callable[[], Sequence[Tensor | None]]


class _Pending(NamedTuple):
    weights: tuple[nn.Parameter, ...]
    compute: Compute


class Tape:
    """The weight gradients that one backward has left for later."""

    def __init__(self) -> None:
        self.is_open = False  # while an input gradient action runs
        self.meant_whole: set[nn.Parameter] = set()  # of operations whose rule is None
        # It stands for the weights: results require grad although the weights are no inputs.
        self.anchor = torch.empty((), requires_grad=True)
        self.asked: dict[nn.Parameter, None] = {}  # by layers, in a forward
        self._pending: list[_Pending] = []

    def __len__(self) -> int:
        return len(self._pending)

    def defer(self, weights: tuple[nn.Parameter, ...], compute: Compute) -> None:
        """Keep a function that returns a gradient, or None, for each of the weights."""
        if not self.is_open:
            raise RuntimeError(
                "a backward inside the forward of a stage reached a linear operation whose weight "
                "gradient is deferred; take a schedule without split backward for such a stage."
            )
        self._pending.append(_Pending(weights, compute))

    def left_out(self) -> list[nn.Parameter]:
        """Return the weights that a layer has asked for and whose gradients nobody handed over."""
        given = {weight for pending in self._pending for weight in pending.weights}
        return [weight for weight in self.asked if weight not in given]

    def compute(self) -> None:
        """Add all weight gradients to `.grad`, in the order in which a whole backward would.

        A weight that was used several times is added once, by autograd's own accumulation: hooks
        see one sum, as in a whole backward.
        """
        uses = Counter(weight for pending in self._pending for weight in pending.weights)
        sums: dict[nn.Parameter, Tensor] = {}
        pending_calls, self._pending = self._pending[::-1], []
        while pending_calls:
            weights, compute = pending_calls.pop()
            for weight, made in zip(weights, _computed(weights, compute), strict=True):
                if made is not None:
                    sums[weight] = sums[weight] + made if weight in sums else made
            del compute  # frees its tensors one call after another
            for weight in weights:
                uses[weight] -= 1
                if not uses[weight] and weight in sums:
                    torch.autograd.backward([weight], [sums.pop(weight)])


def _computed(weights: tuple[nn.Parameter, ...], compute: Compute) -> Sequence[Tensor | None]:
    with torch.no_grad():
        made = compute()
    if not isinstance(made, Sequence) or len(made) != len(weights):
        raise ValueError(
            f"what computes deferred gradients must return one a weight, {len(weights)}, got "
            f"{len(made) if isinstance(made, Sequence) else type(made).__name__}."
        )
    return made


class Deferring(TorchFunctionMode):
    """Replaces the calls that a rule knows, for one stage and microbatch.

    Args:
        rules: How calls split; None for those that are whole on purpose.
        tape: Takes what waits.
        watch: Told the roots of each backward that runs inside, such as that of a recompute.
    """

    def __init__(
        self,
        rules: Mapping[Callable[..., Any], SplitRule | None],
        tape: Tape,
        watch: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        super().__init__()
        self._rules = rules
        self._tape = tape
        self._watch = watch

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or its replacement where its weight gradients can wait."""
        kwargs = kwargs or {}
        if self._watch is not None and func in _BACKWARDS:
            self._watch((args[0],) if isinstance(args[0], Tensor) else args[0])
        rule = self._rules.get(func)
        if rule is None and func in self._rules:
            self._tape.meant_whole.update(parameters_in((None, *args, *kwargs.values())))
        if rule is None or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        arguments = positional(func, args, kwargs)
        if arguments is None or not _can_wait(rule, arguments):
            return func(*args, **kwargs)
        return _Deferred.apply(self._tape.anchor, arguments[0], func, rule, self._tape, arguments)


class _Deferred(torch.autograd.Function):
    """`op(x, *others)`; its backward leaves the weight gradients on an open tape.

    A tape is open only under `Splitter.backward`, which makes no graph of the backward: this one
    never runs with gradients on.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        x: Tensor,
        op: Callable[..., Tensor],
        rule: SplitRule,
        tape: Tape,
        arguments: tuple[Any, ...],
    ) -> Tensor:
        ctx.op, ctx.rule, ctx.tape = op, rule, tape
        ctx.places = [i for i, value in enumerate(arguments) if isinstance(value, Tensor)]
        ctx.save_for_backward(*(arguments[i] for i in ctx.places))
        # Parameters also as they are: a recompute hands back copies without a `.grad`.
        ctx.kept = [
            value if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) else None
            for value in arguments
        ]
        return op(*arguments)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        arguments = list(ctx.kept)
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            if arguments[place] is None:
                arguments[place] = tensor.detach()  # a tape must not keep the graph alive
        places = [i for i, value in enumerate(arguments) if i and _is_weight(value)]
        ctx.tape.defer(
            tuple(arguments[place] for place in places),
            partial(_weight_gradients, ctx.op, ctx.rule, gradient, tuple(arguments), places),
        )
        needs_x = ctx.needs_input_grad[1]
        of_x = ctx.rule.input_gradient(gradient, *arguments) if needs_x else None
        return None, of_x, None, None, None, None


class Splitter:
    """Says which backwards a schedule splits, and makes their tapes.

    Args:
        schedule: What runs.
        rules: For operations besides torch's own linear ones.
        stages: The stage functions of this rank, which may know the names of their weights.
    """

    def __init__(
        self,
        schedule: Schedule,
        rules: Mapping[Callable[..., Any], SplitRule | None],
        stages: Mapping[int, Callable[..., Any]],
    ) -> None:
        self._rules = {**TORCH_RULES, **rules}
        self._stages = stages
        self._split = {
            (action.stage, action.microbatch)
            for row in schedule.actions
            for action in row
            if action.kind == "input_gradient"
        }
        self._tape: Tape | None = None  # of the split backward whose forward or I runs
        self._seen: set[int] = set()  # stages whose graph was looked at
        self._said: set[int] = set()  # stages that were warned of
        self._missed: set[int] = set()  # likewise, of gradients that nobody handed over

    def tape_for(self, action: Action) -> Tape | None:
        """Return a tape for the forward of a backward that will be split, else None."""
        return Tape() if (action.stage, action.microbatch) in self._split else None

    @contextmanager
    def deferring(
        self, tape: Tape, watch: Callable[[Sequence[Tensor]], None] | None = None
    ) -> Iterator[None]:
        """Put the stage's forward, and one that its backward runs again, under a tape."""
        self._tape = tape
        try:
            with Deferring(self._rules, tape, watch):
                yield
        finally:
            self._tape = None

    def defer(self, weights: tuple[nn.Parameter, ...]) -> Callable[[Compute], None] | None:
        """Return what takes in the gradients of a call's weights, or None where nothing waits."""
        if self._tape is None:
            return None
        self._tape.asked.update(dict.fromkeys(weights))
        return partial(self._tape.defer, weights)

    def backward(
        self, tape: Tape, action: Action, tensors: Sequence[Tensor], seeds: Sequence[Tensor]
    ) -> None:
        """Do what `torch.autograd.backward` does, but leave weight gradients on the tape.

        Warns, once a stage, if nothing was left, or if some weights did not wait.
        """
        whole: list[nn.Parameter] = []

        def look(roots: Sequence[Tensor]) -> None:
            whole.extend(whole_weights(roots))

        watch = None if action.stage in self._seen else look
        if watch is not None:
            self._seen.add(action.stage)
            watch(tensors)
        tape.is_open = True
        try:
            with self.deferring(tape, watch):  # for a stage that recomputes
                # Not torch.autograd.backward: as a torch function itself it would end the mode.
                _engine_run_backward(
                    tuple(tensors),
                    tuple(seeds),
                    False,  # retain_graph
                    False,  # create_graph
                    (),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )
        finally:
            tape.is_open = False
        if (left_out := tape.left_out()) and action.stage not in self._missed:
            self._missed.add(action.stage)
            warnings.warn(
                f"gradients of {names_of(left_out, self._stages[action.stage])} are not computed: "
                f"a layer of stage {action.stage} asked `defer` for them in its forward, and its "
                f"backward has not handed over what computes them.",
                stacklevel=3,
            )
        whole = [weight for weight in whole if weight not in tape.meant_whole]
        nothing_waits = not tape and not tape.meant_whole
        if (whole or nothing_waits) and action.stage not in self._said:
            self._said.add(action.stage)
            self._warn(action, tape, whole)

    def _warn(self, action: Action, tape: Tape, whole: Sequence[nn.Parameter]) -> None:
        if not tape and not tape.meant_whole:
            warnings.warn(
                f"the backward of stage {action.stage} could not be split: it calls no linear "
                f"operation with an `nn.Parameter` as its weight (or calls them in a compiled "
                f"graph), so all its gradients are computed at {action.kind} and its weight "
                f"gradient actions do nothing; pass `split_rules` for operations of your own, hand "
                f"`executor.defer` to layers that take it, or take a schedule without split "
                f"backward.",
                stacklevel=3,
            )
            return
        names = names_of(dict.fromkeys(whole), self._stages[action.stage])
        warnings.warn(
            f"the backward of stage {action.stage} is split in part only: gradients of {names} "
            f"are computed at {action.kind}, as no rule splits what uses them (or it runs in a "
            f"compiled graph or inside a function of torch); pass `split_rules` for operations of "
            f"your own, or hand `executor.defer` to layers that take it.",
            stacklevel=3,
        )


def parameters_in(arguments: tuple[Any, ...]) -> list[nn.Parameter]:
    """Return the weights among the arguments after the input."""
    return [value for value in arguments[1:] if _is_weight(value)]


def _is_weight(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and value.requires_grad


def _can_wait(rule: SplitRule, arguments: tuple[Any, ...]) -> bool:
    tensors = [value for value in arguments if isinstance(value, Tensor)]
    plain = all(type(value) in (Tensor, nn.Parameter) for value in tensors)
    # A later argument that has a history needs its gradient now.
    grown = [a for a in arguments[1:] if isinstance(a, Tensor) and a.requires_grad]
    return (
        not torch._C._are_functorch_transforms_active()
        and plain
        and bool(grown)
        and all(isinstance(value, nn.Parameter) for value in grown)
        and isinstance(arguments[0], Tensor)
        and rule.applies(*arguments)
    )


def _weight_gradients(
    op: Callable[..., Any],
    rule: SplitRule,
    gradient: Tensor,
    arguments: tuple[Any, ...],
    places: Sequence[int],
) -> list[Tensor]:
    """Return what a rule makes of the weights at these places.

    No graph has an edge to them: what the rule leaves out, nobody would add.
    """
    made = rule.weight_gradients(gradient, *arguments)
    if not isinstance(made, Sequence) or len(made) >= len(arguments):
        got = len(made) if isinstance(made, Sequence) else f"a {type(made).__name__}"
        raise ValueError(
            f"`weight_gradients` of the split rule of {_name_of(op)} must return a tuple of at "
            f"most one entry per argument after the input, {len(arguments) - 1}, got {got}."
        )
    gradients = []
    for place in places:
        weight, of_weight = arguments[place], made[place - 1] if place <= len(made) else None
        if not isinstance(of_weight, Tensor) or of_weight.shape != weight.shape:
            shape = tuple(of_weight.shape) if isinstance(of_weight, Tensor) else of_weight
            raise ValueError(
                f"`weight_gradients` of the split rule of {_name_of(op)} must return the gradient "
                f"of its argument {place}, a weight of shape {tuple(weight.shape)}, as its entry "
                f"{place - 1}, got {shape}."
            )
        gradients.append(of_weight)
    return gradients


def _name_of(op: Callable[..., Any]) -> str:
    return getattr(op, "__qualname__", None) or str(op)
