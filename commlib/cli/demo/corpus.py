"""Text in, word ids out: the sources of Python's standard library, or any text the user names."""

from __future__ import annotations

import collections
import dataclasses
import re
import sysconfig
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

_WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]")
_SUFFIXES = frozenset({".md", ".py", ".rst", ".txt"})
_INSTALLED = frozenset({"dist-packages", "site-packages"})
_VALID_SHARE = 20
UNKNOWN = "<unk>"

Ids = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text as word ids, split by file.

    Ids follow frequency: 0 is `<unk>`, 1 the most frequent word of the training part.

    Attributes:
        words: The vocabulary, `words[i]` is the word with id i.
        train: Word ids of the training files, one after the other. [num_train]
        valid: Word ids of the validation files. [num_valid]
        source: Where the text came from, for people.
    """

    words: tuple[str, ...]
    train: Ids
    valid: Ids
    source: str

    @property
    def num_rows(self) -> int:
        """Rows V of an embedding table for this vocabulary."""
        return len(self.words)

    def save(self, path: Path) -> None:
        """Writes the corpus to one `.npz` file."""
        np.savez(
            path, words=np.array(self.words), train=self.train, valid=self.valid, source=self.source
        )

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Reads what `save` wrote."""
        with np.load(path) as file:
            return cls(
                words=tuple(file["words"].tolist()),
                train=file["train"],
                valid=file["valid"],
                source=str(file["source"]),
            )


def split_words(text: str) -> list[str]:
    """Splits text into runs of letters, runs of digits and single other characters.

    Underscores separate words, so `max_pool2d` is `max`, `pool`, `2`, `d`.
    """
    return _WORD.findall(text)


def default_source() -> Path:
    """Returns the folder of Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def find_files(source: Path) -> list[Path]:
    """Lists the text files of a source in an order that mixes folders and is the same everywhere.

    Raises:
        ValueError: The source does not exist or holds no text file.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise ValueError(f"text source {str(source)!r} is neither a file nor a folder")
    found = []
    for path in source.rglob("*"):
        relative = path.relative_to(source)
        if (
            path.suffix in _SUFFIXES
            and not _INSTALLED.intersection(relative.parts)
            and path.is_file()
        ):
            found.append((zlib.crc32(relative.as_posix().encode()), relative.as_posix(), path))
    if not found:
        raise ValueError(
            f"text source {str(source)!r} holds no file that ends in {', '.join(sorted(_SUFFIXES))}"
        )
    return [path for _, _, path in sorted(found)]


def read_corpus(
    source: Path | None = None, *, max_vocab: int = 40_000, max_tokens: int = 8_000_000
) -> Corpus:
    """Reads, splits and numbers a text; the same files give the same corpus on every machine.

    Every 20th file is for validation (of a single file, its last twentieth). Words that occur once
    in the training part are `<unk>`, as are those that do not fit `max_vocab`.

    Args:
        source: A file, or a folder whose text files are read. Default: Python's standard library.
        max_vocab: Most rows of the vocabulary, `<unk>` included.
        max_tokens: Reading stops after the file with which this many words are reached.

    Raises:
        ValueError: No text there, or too little to split.
    """
    name = "Python's standard library" if source is None else str(source)
    source = default_source() if source is None else source
    parts: tuple[list[list[str]], list[list[str]]] = ([], [])
    num_tokens = 0
    for file_idx, path in enumerate(find_files(source)):
        words = split_words(path.read_text(encoding="utf-8", errors="replace"))
        parts[file_idx % _VALID_SHARE == _VALID_SHARE - 1].append(words)
        num_tokens += len(words)
        if num_tokens >= max_tokens:
            break
    train, valid = parts
    if not valid:
        train, valid = _split_last(train)
    counts = collections.Counter[str]()
    for words in train:
        counts.update(words)
    repeated = [(-count, word) for word, count in counts.items() if count > 1]
    vocabulary = (UNKNOWN, *(word for _, word in sorted(repeated)[: max_vocab - 1]))
    ids = {word: idx for idx, word in enumerate(vocabulary)}
    return Corpus(
        words=vocabulary, train=_number(train, ids), valid=_number(valid, ids), source=name
    )


def _split_last(train: list[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Takes the last twentieth of a text of few files for validation."""
    words = [word for file in train for word in file]
    num_valid = len(words) // _VALID_SHARE
    if num_valid < 2:
        raise ValueError(f"a text of {len(words)} words is too short: it needs at least 40")
    return [words[:-num_valid]], [words[-num_valid:]]


def _number(files: list[list[str]], ids: dict[str, int]) -> Ids:
    return np.array([ids.get(word, 0) for words in files for word in words], dtype=np.int32)
