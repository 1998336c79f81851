"""`config.json` to the configuration of a run. No torch: a wrong one is answered at once."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from olmo_trainer.config import ModelConfig, TrainerConfig
from olmo_trainer.overrides import apply_overrides, parse_config

# Coefficients of a run, which no checkpoint of another trainer states: a recipe does.
RUN_COEFFICIENTS = ("balance_loss", "balance_scope", "z_loss")


def read_fields(folder: Path) -> dict[str, Any]:
    """Return the contents of the folder's `config.json`.

    Raises:
        ValueError: It is not there, or is not JSON.
    """
    path = folder / "config.json"
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path}: cannot be read: {type(error).__name__}; give a folder in the format of "
            "Hugging Face, with config.json and model.safetensors"
        ) from None


def configure(recipe: TrainerConfig, settings: Sequence[str], model: ModelConfig) -> TrainerConfig:
    """Return the recipe with its settings and another model.

    Args:
        recipe: Everything but the model.
        settings: `key=value`, as on the command line; of the model, loss coefficients alone.
        model: What `config.json` states.

    Raises:
        ValueError: A setting would change the model, or is wrong, or the recipe does not fit it.
    """
    free = {f"model.moe.{key}" for key in RUN_COEFFICIENTS}
    for key in (setting.partition("=")[0] for setting in settings):
        if key.startswith("model.") and key not in free:
            raise ValueError(f"{key}: the model is what config.json states; change it there")
    chosen = apply_overrides(recipe, settings)
    coefficients = {key: getattr(chosen.model.moe, key) for key in RUN_COEFFICIENTS}
    tree = model.model_dump(mode="json")
    tree["moe"] |= coefficients
    return parse_config(chosen.model_dump(mode="json") | {"model": tree})
