"""Which text a run reads, and how it is cut, held out and filtered."""

from typing import Annotated, Literal

from pydantic import Field

from olmo_trainer.config_node import Config, SplitWords


class StandardLibrarySource(Config):
    """The text of the Python standard library that came with the interpreter."""

    kind: Literal["standard_library"] = "standard_library"


class TextFolderSource(Config):
    """A folder of the user's own text files, a document each."""

    kind: Literal["text_folder"] = "text_folder"
    path: str = Field(min_length=1)
    pattern: str = Field(default="*.txt", min_length=1)


class TokenFilesSource(Config):
    """Token files: folders that `prepare` wrote, or OLMo-core's memory maps."""

    kind: Literal["token_files"] = "token_files"
    paths: Annotated[tuple[str, ...], SplitWords] = Field(
        min_length=1, description="files, folders or patterns"
    )
    dtype: Literal["auto", "uint16", "uint32"] = Field(
        default="auto", description="auto = what the manifest or the header says"
    )
    end_of_document: int | None = Field(
        default=None, ge=0, description="id that ends a document; none = what the manifest says"
    )
    check: Literal["all", "sampled"] = Field(
        default="all", description="how much of files without a manifest is read before training"
    )


PlainSourceConfig = Annotated[
    StandardLibrarySource | TextFolderSource | TokenFilesSource, Field(discriminator="kind")
]


class IngredientConfig(Config):
    """A source of a mixture."""

    source: PlainSourceConfig
    weight: float = Field(default=1.0, gt=0, description="relative to the other sources'")
    max_passes: float | None = Field(
        default=None, gt=0, description="most times it is read; none = data.max_passes"
    )


class MixtureSource(Config):
    """Several sources, by name, each with a weight."""

    kind: Literal["mixture"] = "mixture"
    sources: dict[Annotated[str, Field(min_length=1)], IngredientConfig] = Field(min_length=1)


SourceConfig = Annotated[
    StandardLibrarySource | TextFolderSource | TokenFilesSource | MixtureSource,
    Field(discriminator="kind"),
]


class NoFilter(Config):
    """Train on every sequence."""

    kind: Literal["none"] = "none"


class RepeatsFilter(Config):
    """Leave out sequences in which a short pattern stands many times in a row."""

    kind: Literal["repeats"] = "repeats"
    max_period: int = Field(default=13, ge=1, description="longest pattern, in tokens")
    max_count: int = Field(default=32, ge=2, description="times in a row that are too many")


FilterConfig = Annotated[NoFilter | RepeatsFilter, Field(discriminator="kind")]


class DataConfig(Config):
    """Which text, and how it is held out and packed."""

    source: SourceConfig = StandardLibrarySource()
    max_passes: float | None = Field(
        default=None, gt=0, description="most times any text is read; none = without end"
    )
    attend: Literal["sequence", "document"] = Field(
        default="sequence", description="document = no token sees another document's"
    )
    filter: FilterConfig = NoFilter()
    sequence_length: int = Field(default=256, ge=2)
    heldout_fraction: float = Field(default=0.05, gt=0, lt=1)
