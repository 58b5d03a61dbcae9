"""Text for language models (files, or the source of Python's standard library), and subword vocabularies."""

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

from gossamer import InputError
from gossamer.recipes.data import files
from gossamer.recipes.data.files import need

PAD, BOS, EOS = 0, 1, 2
_SPECIAL = ["<pad>", "<bos>", "<eos>"]
SMALLEST = len(_SPECIAL) + 256

# Large modules of one file each that every supported Python has.
_MODULES = (
    *("argparse", "ast", "codecs", "csv", "difflib", "doctest", "enum", "fractions", "functools", "inspect"),
    *("locale", "mailbox", "optparse", "os", "pickle", "random", "shutil", "statistics", "subprocess", "tarfile"),
    *("textwrap", "threading", "tokenize", "traceback", "turtle", "typing"),
)


def load_text(path: Path | None) -> tuple[str, list[str]]:
    """Return a name and the documents. A directory gives all its files except hidden ones, sorted by path."""
    if path is None:
        return "Python standard library", _standard_library()
    if path.is_dir():
        found = sorted(
            file
            for file in path.rglob("*")
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        if not found:
            raise InputError(f"{path} holds no files: name a text file or a directory of text files")
    elif path.is_file():
        found = [path]
    else:
        raise InputError(f"{path} does not exist: name a text file or a directory of text files")
    documents = [text for text in map(files.read_text, found) if text.strip()]
    if not documents:
        raise InputError(f"{path} holds no text: its {len(found)} file(s) are empty")
    return path.name, documents


def _standard_library() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    found = [root / f"{module}.py" for module in _MODULES]
    if missing := [path for path in found if not path.is_file()]:
        raise InputError(f"this Python has no source of its standard library ({missing[0]}): pass data")
    return [files.read_text(path) for path in found]


class Subwords:
    """Byte-pair encoding over bytes, learned from text: any text can be encoded, and decoding restores it exactly.

    The same text gives the same vocabulary in every process.
    """

    def __init__(self, text: Iterable[str], size: int, *, exact: bool = True) -> None:
        """Learn `size` subwords; raise `InputError` if `exact` and the corpus yields fewer."""
        if size < SMALLEST:
            raise InputError(f"vocabulary = {size} is too small: bytes and special tokens alone are {SMALLEST}")
        # Its thread pool warns after a fork and gains nothing when every core has a worker.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        tokenizers = need("tokenizers", "tokenizers")
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        self._tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size, special_tokens=_SPECIAL, initial_alphabet=sorted(alphabet), show_progress=False
        )
        self._tokenizer.train_from_iterator(text, trainer)
        # A text that spells out a special token ("<eos>") must not end there.
        self._tokenizer.encode_special_tokens = True
        self.size: int = self._tokenizer.get_vocab_size()
        if exact and self.size < size:
            raise InputError(
                f"vocabulary = {size} is larger than the corpus allows, which yields {self.size} subwords: "
                f"use at most {self.size}"
            )

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(lines))]

    def decode(self, tokens: Iterable[Sequence[int]]) -> list[str]:
        return list(self._tokenizer.decode_batch([list(line) for line in tokens], skip_special_tokens=True))

    def digest(self) -> str:
        """Return a digest of the vocabulary: equal digests mean equal vocabularies."""
        return hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()[:16]
