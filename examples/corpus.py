"""Text to train on: the Python standard library's source, the user's files, or a file of uint16 tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import platform
import sysconfig
from collections.abc import Iterator, Sequence

import numpy as np

# Left out of the standard library: tests, installed packages, tables of character codes, and what differs
# between two installations of one Python version.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
SKIPPED_FOLDERS |= {"pydoc_data", "lib2to3", "turtledemo", "ensurepip"}
SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Two disjoint sequences of tokens; `sha256` covers both: equal hashes mean equal data and split."""

    name: str
    train: np.ndarray
    valid: np.ndarray
    vocab: int
    sha256: str

    def __str__(self) -> str:
        sizes = f"{len(self.train):,} tokens to train on, {len(self.valid):,} held out"
        return f"corpus: {self.name}, {sizes}, vocabulary of {self.vocab:,}, sha256 {self.sha256[:16]}"


def load(text: Sequence[str] = (), tokens: str | None = None) -> Corpus:
    """The user's text or tokens where given, else the standard library."""
    if tokens:
        return token_file(tokens)
    return text_files(text) if text else standard_library()


def standard_library() -> Corpus:
    """The `.py` files of this Python's standard library as bytes. One in ten, by hash, is held out."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    train, valid, seen = [], [], set()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        if path.name.startswith(SKIPPED_PREFIXES) or SKIPPED_FOLDERS.intersection(name.split("/")):
            continue
        content = path.read_bytes()
        if content in seen:  # a copy must not lie on both sides of the split
            continue
        seen.add(content)
        held_out = hashlib.sha256(name.encode()).digest()[0] < 26  # 26 of 256
        (valid if held_out else train).append(content)
    name = f"standard library of Python {platform.python_version()}"
    # A zero byte, which no source file holds, ends each file.
    return _corpus(name, *(np.frombuffer(b"\0".join(files), np.uint8) for files in (train, valid)), vocab=256)


def text_files(paths: Sequence[str]) -> Corpus:
    """The files as bytes; the last tenth of each is held out."""
    train, valid = [], []
    for path in paths:
        content = pathlib.Path(path).read_bytes()
        cut = len(content) * 9 // 10
        train.append(content[:cut])
        valid.append(content[cut:])
    name = ", ".join(pathlib.Path(path).name for path in paths)
    return _corpus(name, *(np.frombuffer(b"\0".join(files), np.uint8) for files in (train, valid)), vocab=256)


def token_file(path: str) -> Corpus:
    """A file of uint16 tokens as nanoGPT's `prepare.py` writes them; the last tenth is held out."""
    content = np.fromfile(path, dtype="<u2")
    cut = len(content) * 9 // 10
    return _corpus(pathlib.Path(path).name, content[:cut], content[cut:], vocab=int(content.max()) + 1)


def _corpus(name: str, train: np.ndarray, valid: np.ndarray, vocab: int) -> Corpus:
    digest = hashlib.sha256(train.tobytes())
    digest.update(len(train).to_bytes(8, "little") + valid.tobytes())
    return Corpus(name, train, valid, vocab, digest.hexdigest())


def batch(tokens: np.ndarray, seed: int, step: int, sequences: int, context: int) -> np.ndarray:
    """Random windows, int32 [sequences, context + 1]. A pure function, so that a run can be resumed."""
    _check_length(tokens, context)
    starts = np.random.default_rng((seed, step)).integers(len(tokens) - context, size=sequences)
    return tokens[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def fixed_batches(tokens: np.ndarray, count: int, sequences: int, context: int) -> Iterator[np.ndarray]:
    """The same `count` batches of evenly spread windows in every run, int32 [sequences, context + 1]."""
    _check_length(tokens, context)
    starts = np.linspace(0, len(tokens) - context - 1, count * sequences).astype(np.int64)
    for part in starts.reshape(count, sequences):
        yield tokens[part[:, None] + np.arange(context + 1)].astype(np.int32)


def _check_length(tokens: np.ndarray, context: int) -> None:
    if len(tokens) <= context:
        raise ValueError(
            f"A split of {len(tokens)} tokens has no window of context + 1 = {context + 1} tokens."
        )
