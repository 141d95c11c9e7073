"""Tokenizers: loading one, and training a byte-level BPE.

The `tokenizers` package is imported where it is needed, to keep the import of this package light.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)
EOS_TOKEN = "<|endoftext|>"
_KNOWN_EOS = (EOS_TOKEN, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[EOS]", "<|eos|>")


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a ``tokenizer.json``, set to encode plain text: no truncation, padding or specials from text.

    Raises:
        ValueError: If the file is missing or no tokenizer.
    """
    if not path.is_file():
        raise ValueError(f"tokenizer: {path} does not exist; train one with `seqarch data tokenizer`")
    return tokenizer_from_text(path.read_text(encoding="utf-8"), str(path))


def tokenizer_from_text(text: str, name: str) -> Tokenizer:
    """The tokenizer that ``text`` (the content of a ``tokenizer.json``) describes; see `load_tokenizer`."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ValueError(f"tokenizer: {name} is not a valid tokenizer.json ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" written in a text is text
    return tokenizer


def tokenizer_bytes(tokenizer: str) -> bytes:
    """The ``tokenizer.json`` that the option names: a file, a folder that holds one, or a name on the Hugging Face Hub.

    Raises:
        ValueError: If it is none of these.
    """
    path = Path(tokenizer).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.is_file():
        return path.read_bytes()
    if path.suffix == ".json" or len(path.parts) > 2 or path.is_absolute():
        raise ValueError(f"tokenizer: {path} does not exist; train one with `seqarch data tokenizer`")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(tokenizer, "tokenizer.json")).read_bytes()
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"tokenizer: '{tokenizer}' is no file, and no tokenizer.json of that name could be had from the Hugging "
            f"Face Hub ({reason}); pass the path of a tokenizer.json, or train one with `seqarch data tokenizer`"
        ) from error


def hash_bytes(data: bytes) -> str:
    """SHA-256 as hexadecimal: the identity of a ``tokenizer.json``."""
    return hashlib.sha256(data).hexdigest()


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id, added tokens included."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def find_eos(tokenizer: Tokenizer, eos_token: str | None = None) -> tuple[str, int]:
    """The end-of-text token and its id: the one named, else the first of the usual ones that the vocabulary has.

    Raises:
        ValueError: If the vocabulary does not have it.
    """
    for token in (eos_token,) if eos_token is not None else _KNOWN_EOS:
        token_id = tokenizer.token_to_id(token)
        if token_id is not None:
            return token, token_id
    if eos_token is not None:
        raise ValueError(f"eos_token: '{eos_token}' is not in the tokenizer's vocabulary")
    raise ValueError(f"eos_token: the tokenizer has none of {', '.join(_KNOWN_EOS)}; name its end-of-text token")


def train_bpe(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE (GPT-2's pre-tokenisation) of ``vocab_size`` ids, trained on ``texts``; `EOS_TOKEN` is id 0."""
    if vocab_size < 257:
        raise ValueError(f"vocab_size must be at least 257 (every byte and {EOS_TOKEN}), got {vocab_size}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_tokenizer(
    input: str | list[str],
    output: str | os.PathLike,
    *,
    vocab_size: int = 32768,
    domains: list[str] | None = None,
    max_bytes: int = 2_000_000_000,
    text_key: str = "text",
    text_documents: str = "file",
) -> None:
    """Train a byte-level BPE tokenizer on raw text and write it as a tokenizer.json.

    Args:
        input: Files (JSON lines, Parquet, text; .gz and .zst too), folders, globs or Hub names; one, or a list in
            brackets.
        output: The tokenizer.json to write, or a folder for it.
        vocab_size: Number of ids, <|endoftext|> included; fewer if the text does not yield as many.
        domains: Use only records of these domains (by their meta.redpajama_set_name or meta.domain); all if not given.
        max_bytes: Stop reading after this much text, so that a large input is sampled from its beginning.
        text_key: Field or column that holds the text.
        text_documents: What a document of a plain text file is: the file, a line, or a paragraph (blank lines between).
    """
    from seqarch.data.manifest import write_aside
    from seqarch.data.progress import progress_bar
    from seqarch.data.reading import read_documents, resolve_inputs

    output = Path(output)
    path = output if output.suffix == ".json" else output / "tokenizer.json"
    inputs = resolve_inputs(input)
    seen: set[str] = set()
    used = 0

    def texts() -> Iterator[str]:
        nonlocal used
        with progress_bar("reading for the tokenizer", unit="bytes", total=None) as advance:
            for document in read_documents(inputs, text_key, text_documents, by_label=domains is not None):
                seen.add(document.domain)
                if domains is not None and document.domain not in domains:
                    continue
                used += document.n_bytes
                advance(document.n_bytes)
                yield document.text
                if used >= max_bytes:
                    return

    tokenizer = train_bpe(texts(), vocab_size)
    if used == 0:
        wanted = f" of the domains {', '.join(domains)} (there are: {', '.join(sorted(seen))})" if domains else ""
        raise ValueError(f"input: {input} holds no text{wanted}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_aside(path, tokenizer.to_str(pretty=True).encode())
    found = vocabulary_size(tokenizer)
    few = f", fewer than vocab_size = {vocab_size}: so little text yields no more" if found < vocab_size else ""
    log.info("%s: %s ids from %s bytes of text%s", path, f"{found:,}", f"{used:,}", few)
