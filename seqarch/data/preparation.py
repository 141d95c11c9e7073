"""What a run of `seqarch data prepare` is, and how its shards join the corpus."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from seqarch.data.manifest import Manifest, Run, TokenizerRecord, load_manifest, locked, save_manifest, write_aside
from seqarch.data.reading import Source
from seqarch.data.staging import Staging

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """What decides the shards' content, and where they go; see `prepare` for each."""

    input: str
    root: Path
    split: str
    domain: str | None
    text_key: str
    text_documents: str
    part: tuple[int, int]
    tokenizer: TokenizerRecord

    def key(self, sources: list[Source]) -> str:
        """Identity of a run, the same for all its parts."""
        what = [self.split, self.domain, self.text_key, self.text_documents, self.tokenizer.hash, self.tokenizer.eos_id]
        return _digest([what, [s.name for s in sources]])

    @property
    def suffix(self) -> str:
        """What the shards of a part add to their names."""
        return "" if self.part[1] == 1 else f".{self.part[0]:05d}-of-{self.part[1]:05d}"


def _digest(what: list) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def already_prepared(options: Options, key: str, sources: list[Source]) -> bool:
    """Whether the manifest has this run; ``ValueError`` if it cannot be added to what the manifest has."""
    manifest = load_manifest(options.root)
    if manifest is None:
        return False
    if manifest.tokenizer != options.tokenizer:
        raise ValueError(
            f"tokenizer: {options.root} was prepared with another one (hash {manifest.tokenizer.hash[:12]}, end of "
            f"text {manifest.tokenizer.eos_token}), not {options.tokenizer.hash[:12]} ({options.tokenizer.eos_token}); "
            "prepare into another folder"
        )
    for run in manifest.runs:
        if run.key == key and tuple(run.part) == options.part:
            if run.sizes != input_sizes(sources):
                raise ValueError(
                    f"input: {options.input} has changed since {options.root} was prepared from it; "
                    "prepare into another folder"
                )
            return True
    if options.domain is not None:
        check_free(manifest, options, key, options.domain)
    return False


def input_sizes(sources: list[Source]) -> str:
    """Stands for the sizes of all inputs."""
    return _digest([s.size for s in sources])


def check_free(manifest: Manifest | None, options: Options, key: str, domain: str) -> None:
    """``ValueError`` if the domain is there from another input or from parts of another number."""
    runs = manifest.runs if manifest is not None else []
    for run in runs:
        same = run.key == key and run.part[1] == options.part[1]
        if not same and run.options["split"] == options.split and domain in run.domains:
            raise ValueError(
                f"{options.root} already holds domain {domain} ({options.split}) from {run.options['input']} as it was "
                "then, or in other parts; prepare into another folder, or give all the input at once"
            )


def publish(options: Options, key: str, sizes: str, staging: Staging, tokenizer: bytes) -> None:
    """Move the sealed shards into the corpus and enter them in its manifest."""
    root = options.root
    with locked(root / ".prepare" / "lock"):
        manifest = load_manifest(root) or Manifest(options.tokenizer)
        if manifest.tokenizer != options.tokenizer:
            raise ValueError(f"tokenizer: {root} was meanwhile prepared with another one; prepare into another folder")
        shards = staging.sealed()
        for record in shards:
            check_free(manifest, options, key, _domain(record.name))
        staging.publish(root, shards)
        if not (root / "tokenizer.json").exists():
            write_aside(root / "tokenizer.json", tokenizer)
        split = manifest.splits.setdefault(options.split, {})
        for record in shards:
            others = [s for s in split.get(_domain(record.name), []) if s.name != record.name]
            split[_domain(record.name)] = sorted([*others, record], key=lambda s: s.name)
        manifest.splits[options.split] = dict(sorted(split.items()))
        described = {
            "input": options.input,
            "split": options.split,
            "domain": options.domain,
            "text_key": options.text_key,
            "text_documents": options.text_documents,
        }
        run = Run(key, list(options.part), sizes, described, sorted(staging.journal.counts), staging.journal.empty)
        manifest.runs = sorted([*manifest.runs, run], key=lambda r: (r.key, r.part))
        save_manifest(root, manifest)
    staging.discard()
    tokens = sum(s.tokens for s in shards)
    documents = sum(s.documents for s in shards)
    log.info("%s: %d documents, %d tokens in %d domains", options.split, documents, tokens, len(shards))


def _domain(shard_name: str) -> str:
    return Path(shard_name).name.split(".")[0]
