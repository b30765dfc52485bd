"""The demo's text: the same everywhere, and distributed like words are."""

import numpy as np
import pytest

from commlib.cli.demo.corpus import Corpus, default_source, find_files, read_corpus, split_words


@pytest.fixture
def folder(tmp_path):
    """Forty files; file i holds words whose counts fall with i."""
    for idx in range(40):
        path = tmp_path / ("a" if idx % 2 else "b") / f"{idx}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(" ".join(f"{'w' * (n + 1)}" for n in range(idx % 7 + 1)))
    (tmp_path / "a" / "image.png").write_bytes(b"\x00")
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "other.py").write_text("zebra zebra")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("self.max_pool2d(x)", ["self", ".", "max", "pool", "2", "d", "(", "x", ")"]),
        ("a  +=\n1.5", ["a", "+", "=", "1", ".", "5"]),
        ("größe", ["größe"]),
        ("", []),
    ],
)
def test_split_words(text, words):
    assert split_words(text) == words


def test_only_own_text_files_are_read(folder):
    files = find_files(folder)
    assert len(files) == 40
    assert {path.suffix for path in files} == {".py"}


def test_a_corpus_is_the_same_each_time(folder):
    first, second = read_corpus(folder), read_corpus(folder)
    assert first.words == second.words
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.valid, second.valid)


def test_every_twentieth_file_is_for_validation(folder):
    corpus = read_corpus(folder)
    counts = [len(split_words(path.read_text())) for path in find_files(folder)]
    assert len(corpus.valid) == counts[19] + counts[39]
    assert len(corpus.train) + len(corpus.valid) == sum(counts)


def test_ids_follow_frequency_and_rare_words_are_unknown(folder):
    corpus = read_corpus(folder, max_vocab=4)
    assert corpus.words == ("<unk>", "w", "ww", "www")
    counts = np.bincount(corpus.train, minlength=4)
    assert counts[1] >= counts[2] >= counts[3] > 0
    assert counts[0] > 0


def test_save_and_load(folder, tmp_path):
    corpus = read_corpus(folder)
    corpus.save(tmp_path / "corpus.npz")
    loaded = Corpus.load(tmp_path / "corpus.npz")
    assert loaded.words == corpus.words
    assert loaded.source == str(folder)
    np.testing.assert_array_equal(loaded.train, corpus.train)


def test_one_file_is_split_by_position(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("one two " * 100)
    corpus = read_corpus(path)
    assert (len(corpus.train), len(corpus.valid)) == (190, 10)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("none", None, "neither a file nor a folder"), ("short.txt", "few words", "too short")],
)
def test_a_bad_source_is_named(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_corpus(tmp_path / name)


def test_the_standard_library_follows_zipf():
    corpus = read_corpus(max_tokens=400_000)
    assert default_source().is_dir()
    counts = np.sort(np.bincount(corpus.train))[::-1]
    ranks = np.arange(10, 2_000)
    slope = np.polyfit(np.log(ranks), np.log(counts[ranks]), 1)[0]
    assert -1.4 < slope < -0.7
