import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from olmo_trainer.config import TrainerConfig
from olmo_trainer.overrides import apply_overrides
from olmo_trainer.recipes import nano

torch.set_num_threads(1)

MakeConfig = Callable[..., TrainerConfig]


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve small documents of words: a language that a tiny model can start to learn."""
    folder = tmp_path_factory.mktemp("texts")
    words = random.Random(0)
    vocabulary = ["".join(words.choices("abcdefgh", k=words.randint(2, 6))) for _ in range(40)]
    for index in range(12):
        text = " ".join(words.choices(vocabulary, k=words.randint(150, 400)))
        (folder / f"{index:02}.txt").write_text(text)
    return folder


@pytest.fixture
def make_config(text_folder: Path, tmp_path: Path) -> MakeConfig:
    """Return a function: settings to a nano config on the small documents."""

    def make(*settings: str, run: str = "run") -> TrainerConfig:
        base = (
            "data.source.kind=text_folder",
            f"data.source.path={text_folder}",
            "data.sequence_length=32",
            "run.heldout_every=0",
            "run.sample_bytes=0",
            "run.threads=1",
            f"run.folder={tmp_path / run}",
        )
        return apply_overrides(nano(), [*base, *settings]).for_world(1)

    return make
