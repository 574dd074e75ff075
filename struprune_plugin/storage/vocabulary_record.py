"""``struprune_vocabulary.json``: the record of a trimmed vocabulary, for readers. Imports nothing heavy."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict
from pydantic.dataclasses import dataclass

from struprune_plugin.storage.files import write_whole

VOCABULARY_NAME = "struprune_vocabulary.json"
BITS_PER_TOKEN = 2.0  # growth of a text's bits over that of its number of tokens; measured, docs/vocabulary.md


@dataclass(frozen=True)
class CurvePoint:
    """One size of the vocabulary, and what it is estimated to cost on held-out text.

    :param tokens_more: growth of the number of tokens, an upper bound
    """

    rows: int
    parameters: int  # of the whole model
    tokens_more: float

    @property
    def bits_more(self) -> float:
        """Estimated growth of the text's bits."""
        return BITS_PER_TOKEN * self.tokens_more


class VocabularyRecord(BaseModel):
    """Record of the tokens that went and of those that stayed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: str  # folder or hub name of the model with the whole vocabulary
    rows_before: int
    rows_after: int
    parameters_before: int  # as stored
    parameters_after: int
    held_out_bytes: int
    held_out_tokens_before: int
    held_out_tokens_after: int
    scripts: dict[str, tuple[int, int]]  # tokens whose first letter is of a script, before and after
    curve: list[CurvePoint]
    kept: list[int]  # ids in ``base`` by new id


def write_record(record: VocabularyRecord, folder: Path) -> None:
    """Write a record into a folder, whole or not at all."""
    write_whole(folder / VOCABULARY_NAME, record.model_dump_json() + "\n")


def carry_record(source: Path, folder: Path) -> None:
    """Write the record of a folder, if it has one, into another."""
    if (record := read_record(source)) is not None:
        write_record(record, folder)


def read_record(folder: str | Path) -> VocabularyRecord | None:
    """Return the record of a folder, None if its vocabulary is whole.

    :raises ValueError: it is not a record
    """
    file = Path(folder) / VOCABULARY_NAME
    return VocabularyRecord.model_validate_json(file.read_bytes()) if file.is_file() else None
