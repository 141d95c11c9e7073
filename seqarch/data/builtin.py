"""The built-in corpus: harvested from this Python installation, tokenised once and cached."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from pathlib import Path

from seqarch.data.harvest import DOMAINS, MAX_BYTES, MIN_TEST_BYTES, Text, harvest, installed_distributions
from seqarch.data.manifest import locked, manifest_path
from seqarch.data.prepare import prepare
from seqarch.data.tokenizer import train_bpe

TRAIN_DOMAINS = ("docs", "readme")
"""What its tokenizer is trained on."""
_VERSION = 1
log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """``SEQARCH_CACHE``, else ``seqarch`` in ``XDG_CACHE_HOME``, else ``~/.cache/seqarch``."""
    own = os.environ.get("SEQARCH_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seqarch"


def environment_fingerprint() -> str:
    """Hash of the interpreter's version, of all installed distributions with their versions, and of what is taken."""
    names = [f"{d.metadata['Name']}=={d.version}" for d in installed_distributions()]
    return hashlib.sha256(json.dumps([_VERSION, MAX_BYTES, sys.version, names]).encode()).hexdigest()[:16]


def builtin_corpus(vocab_size: int = 4096) -> Path:
    """The folder of the built-in corpus; builds it first if this installation has none yet.

    Domains: ``docs`` (docstrings) and ``readme`` (package descriptions) to train on, ``code`` (Python), ``headers`` (C
    and C++) and ``legal`` (licences). Each has a train and a test split, of different packages. A domain of which too
    little is installed is left out, with a warning.

    Args:
        vocab_size: Ids of its byte-level BPE, trained on the training text of docs and readme.
    """
    cache = cache_folder()
    root = cache / f"builtin-{environment_fingerprint()}-{vocab_size}"
    if manifest_path(root).exists():
        return root
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"{root.name}.lock"):
        if not manifest_path(root).exists():
            _build(root, vocab_size)
    return root


def _build(root: Path, vocab_size: int) -> None:
    log.info("building the built-in corpus from this Python installation: %s", root)
    aside = root.with_name(f"{root.name}.building")
    shutil.rmtree(aside, ignore_errors=True)  # left by a build that was killed
    aside.mkdir()
    try:
        texts = harvest()
        raw = aside / "raw"
        raw.mkdir()
        kept = [d for d in DOMAINS if _enough(texts, d)]
        if not any(d in TRAIN_DOMAINS for d in kept):
            raise ValueError(
                "path: builtin: this Python installation holds too little text; prepare a corpus of your own"
            )
        for split, domains in texts.items():
            with (raw / f"{split}.jsonl").open("w", encoding="utf-8") as f:
                for domain in kept:
                    for text in domains[domain]:
                        f.write(json.dumps({"text": text.text, "meta": {"domain": domain}}, ensure_ascii=False) + "\n")
        tokenizer = train_bpe((t.text for d in TRAIN_DOMAINS if d in kept for t in texts["train"][d]), vocab_size)
        (raw / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        corpus = aside / "corpus"
        for split in ("train", "test"):
            prepare(str(raw / f"{split}.jsonl"), corpus, tokenizer=str(raw / "tokenizer.json"), split=split)
        os.replace(corpus, root)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _enough(texts: dict[str, dict[str, list[Text]]], domain: str) -> bool:
    for split in ("train", "test"):
        size = sum(len(t.text) for t in texts[split][domain])
        if size < MIN_TEST_BYTES:
            log.warning(
                "built-in corpus: domain %s is left out: only %d characters for %s are installed", domain, size, split
            )
            return False
    return True
