"""`--set a.b=c`: change one value of a recipe, or say exactly which key, value or rule is wrong."""

import difflib
import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from olmo_trainer.config import TrainerConfig


class ConfigError(ValueError):
    """A message for the person who wrote the configuration: key, value and rule."""


def apply_overrides(config: TrainerConfig, settings: Sequence[str]) -> TrainerConfig:
    """Return `config` with every `key=value` of `settings` applied, in order.

    A value is read as JSON where it is JSON (`3`, `0.1`, `true`, `null`, `["a"]`) and as text
    otherwise. Setting a `kind` to another strategy starts that strategy from its own defaults.

    Raises:
        ConfigError: A setting without `=`, an unknown key, or a value that breaks a rule.
    """
    tree = config.model_dump(mode="json")
    pairs = [_split(setting) for setting in settings]
    for key, value in sorted(pairs, key=lambda pair: not pair[0].endswith("kind")):
        if key.endswith(".kind"):
            _set_kind(tree, key, value)
    for key, value in pairs:
        _set(tree, key, value)
    return parse_config(tree)


def parse_config(tree: dict[str, Any]) -> TrainerConfig:
    """Check a nested dictionary; raise `ConfigError` naming each wrong key, value and rule."""
    for key, value in _leaves(tree):
        # No field is a truth value, and pydantic would read true as 1.
        if isinstance(value, bool):
            raise ConfigError(f"{key} = {str(value).lower()}: must not be true or false")
    try:
        return TrainerConfig.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(problem, tree) for problem in error.errors(include_url=False)]
        raise ConfigError("\n".join(lines)) from None


def _split(setting: str) -> tuple[str, Any]:
    key, separator, text = setting.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set needs KEY=VALUE, got {setting!r}; as in --set batch.sequences=8")
    try:
        return key, json.loads(text, object_pairs_hook=partial(_require_once, key))
    except json.JSONDecodeError:
        return key, text


def _require_once(key: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object, of which Python's reader would keep the last of a name."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{key}: must name each once, got {name!r} twice")
    return dict(pairs)


def _set_kind(tree: dict[str, Any], key: str, value: Any) -> None:
    node = _parent(tree, key)
    if "kind" in node and node["kind"] != value:
        node.clear()
        node["kind"] = value
        for model in _models_at(key.split(".")[:-1]):
            if "kind" in model.model_fields and model.model_fields["kind"].default == value:
                # Its groups, whose values can then be set one by one.
                node |= {
                    name: field.default.model_dump(mode="json")
                    for name, field in model.model_fields.items()
                    if isinstance(field.default, BaseModel)
                }


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    node, leaf = _parent(tree, key), key.rpartition(".")[2]
    # The fields of a strategy just switched to are filled in, and wrong ones named, later.
    if leaf not in node and "kind" not in node:
        raise _unknown(key, tree)
    if isinstance(node.get(leaf), dict):
        hint = f"; did you mean {key}.kind?" if "kind" in node[leaf] else ""
        raise ConfigError(f"{key} is a group; set one of its values: {', '.join(node[leaf])}{hint}")
    node[leaf] = value


def _parent(tree: dict[str, Any], key: str) -> dict[str, Any]:
    node = _find(tree, key)
    if not isinstance(node, dict):
        raise _unknown(key, tree)
    return node


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _unknown(key: str, tree: dict[str, Any]) -> ConfigError:
    known = [name for name, _ in _leaves(tree) if name != key]
    parent, _, leaf = key.rpartition(".")
    near = [name for name in known if name.rpartition(".")[2] == leaf]
    # Of a long path the last word decides nothing: it must be near of its own.
    alike = set(difflib.get_close_matches(leaf, {name.rpartition(".")[2] for name in known}, n=99))
    near = near or difflib.get_close_matches(
        key, [name for name in known if name.rpartition(".")[2] in alike], n=1, cutoff=0.8
    )
    node = _find(tree, key)
    where = f" for kind = {node['kind']!r}" if isinstance(node, dict) and "kind" in node else ""
    hint = ""
    if kinds := _kinds_with(key):
        hint = f"; set {parent}.kind = {' or '.join(map(repr, kinds))} for it"
    elif near:
        hint = f"; did you mean {' or '.join(near)}?"
    elif isinstance(node, dict):
        # A wrong leaf of a strategy is in the tree by now, and not all of its right ones are.
        fields = [
            name
            for model in _models_at(parent.split("."))
            if "kind" in node and model.model_fields["kind"].default == node["kind"]
            for name in model.model_fields
        ]
        names = sorted(fields, key="kind".__ne__) or [name for name in node if name != leaf]
        hint = f"; {parent or 'the config'} has {', '.join(names)}"
    return ConfigError(f"{key}: no such key{where}{hint}")


def _kinds_with(key: str) -> list[str]:
    """Return the strategies at the parent of `key` that know its last part."""
    *parents, leaf = key.split(".")
    knowing = [each.model_fields for each in _models_at(parents) if leaf in each.model_fields]
    return [fields["kind"].default for fields in knowing if "kind" in fields]


def _models_at(parts: Sequence[str]) -> list[type[BaseModel]]:
    """Return the configurations that a node of the tree may be, whatever strategy is chosen."""
    nodes: list[type[BaseModel]] = [TrainerConfig]
    for part in parts:
        fields = [node.model_fields[part] for node in nodes if part in node.model_fields]
        nodes = [model for field in fields for model in _models(field.annotation)]
    return nodes


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the configurations that an annotation allows, a union's all."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _find(tree: dict[str, Any], key: str) -> Any:
    node: Any = tree
    for part in key.split(".")[:-1]:
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _explain(problem: Any, tree: dict[str, Any]) -> str:
    # Pydantic puts the tag of a discriminated union into the path; a person did not write it.
    path, node = [], tree
    for part in problem["loc"]:
        if isinstance(node, dict) and part not in node and part == node.get("kind"):
            continue
        path.append(str(part))
        node = node.get(part) if isinstance(node, dict) else None
    key = ".".join(path)
    if problem["type"] == "extra_forbidden":
        return str(_unknown(key, tree))
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "union_tag_invalid":
        context = problem["ctx"]
        return f"{key}.kind = {context['tag']!r}: must be one of {context['expected_tags']}"
    if problem["type"] == "missing":
        return f"{key}: required, not given"
    if isinstance(problem["input"], dict) or not key:
        return f"{key}: {message}" if key else message
    return f"{key} = {problem['input']!r}: {message[0].lower()}{message[1:]}"
