"""`export`: a checkpoint of this trainer as a folder that `transformers` loads."""

import json
import shutil
from pathlib import Path
from typing import Literal

import torch

from olmo_trainer.checkpoint_manifest import Manifest
from olmo_trainer.hugging_face import architecture, weights
from olmo_trainer.hugging_face.architecture import MODULE, Family, family_of
from olmo_trainer.hugging_face.tensor_files import require_safetensors, write_tensors
from olmo_trainer.hugging_face.tokenizer_files import write_tokenizer
from olmo_trainer.sample import load_model

Dtype = Literal["float32", "bfloat16"]


def export_checkpoint(
    manifest: Manifest, folder: Path, *, dtype: Dtype, end: int | None = None
) -> Family:
    """Write the checkpoint's model into `folder`, whole or not at all; return its family.

    Args:
        manifest: Of the checkpoint; whatever layout saved it.
        folder: Must not exist.
        dtype: Of the weights written. "float32" is every bit of the main weights.
        end: The token at which generation stops; `None` = the end of a document, where the run's
            configuration says it.

    Raises:
        ValueError: `folder` exists, `end` is no token, or `safetensors` is not installed.

    Note:
        Takes the memory of the FP32 weights, and of one file of at most 5 GB.
    """
    require_safetensors()
    if folder.exists():
        raise ValueError(f"{folder}: exists already; an export overwrites nothing, name another")
    config = manifest.config
    if end is not None and not 0 <= end < config.model.vocab_size:
        raise ValueError(
            f"the end of a text must be a token, in [0, {config.model.vocab_size}), got {end}"
        )
    family = family_of(config.model)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # At step 0 the run has read no text: its tokens are those of whoever trained it before.
    read = write_tokenizer(config.data, partial) if manifest.step else None
    fields = architecture.to_hugging_face(
        config.model,
        num_positions=config.data.sequence_length,
        end_of_document=read if end is None else end,
        dtype=dtype,
    )
    (partial / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    if family == "olmo_trainer":
        module = Path(__file__).with_name(f"{MODULE}.py")
        shutil.copyfile(module, partial / module.name)
    tensors = weights.to_hugging_face(load_model(manifest).state_dict(), config.model, family)
    cast = getattr(torch, dtype)
    # The selection bias decides by small differences: it stays as it is.
    write_tensors(
        partial,
        ((name, tensor if name.endswith("_bias") else tensor.to(cast)) for name, tensor in tensors),
    )
    partial.rename(folder)
    return family
