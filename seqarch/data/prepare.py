"""`seqarch data prepare`: raw text in, token shards and a manifest out."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

from seqarch.data.domains import check_domain_name
from seqarch.data.manifest import TokenizerRecord, load_manifest, locked, write_aside
from seqarch.data.pool import WorkerPool
from seqarch.data.preparation import Options, already_prepared, check_free, input_sizes, publish
from seqarch.data.progress import progress_bar
from seqarch.data.reading import Progress, Source, read_blocks, resolve_inputs
from seqarch.data.shards import token_dtype
from seqarch.data.staging import Staging
from seqarch.data.tokenizer import find_eos, hash_bytes, tokenizer_bytes, tokenizer_from_text, vocabulary_size
from seqarch.data.worker import BlockTokens, Task
from seqarch.options import at_least, one_of

COMMIT_SECONDS = 2.0
log = logging.getLogger(__name__)


def prepare(
    input: str | list[str],
    output: str | os.PathLike,
    *,
    tokenizer: str | None = None,
    split: Literal["train", "test"] = "train",
    domain: str | None = None,
    text_key: str = "text",
    text_documents: Literal["file", "line", "paragraph"] = "file",
    eos_token: str | None = None,
    processes: int | None = None,
    part: str = "1/1",
) -> None:
    """Tokenise raw text into shards by domain. Run it once for each split; an interrupted run goes on where it stopped.

    Args:
        input: Files (JSON lines, Parquet, text; .gz and .zst too), folders, globs or Hub names; one, or a list in
            brackets. A Hub name may say which of its splits: owner/name:validation.
        output: Folder of the corpus: manifest.json, tokenizer.json, and train/ and test/ with a shard for each domain.
        tokenizer: A tokenizer.json, a folder with one, or a Hub name; by default the tokenizer.json in output.
        split: Whether the text is for training or for testing.
        domain: Domain of all the text; by default each record's own, from meta.redpajama_set_name or meta.domain.
        text_key: Field or column that holds the text.
        text_documents: What a document of a plain text file is: the file, a line, or a paragraph (blank lines between).
        eos_token: Token that ends each document; by default the usual one that the tokenizer has.
        processes: Tokenising processes; by default one for each core that this process may use.
        part: i/n: read only the i-th of n parts of the input files, for n machines that share the output folder.
    """
    root = Path(output)
    sources = resolve_inputs(input)
    part_i_n = _parse_part(part)
    if processes is None:
        processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    at_least(1, processes=processes)
    one_of(("train", "test"), split=split)
    one_of(("file", "line", "paragraph"), text_documents=text_documents)
    if domain is not None:
        check_domain_name(domain)
    data, record = _tokenizer(tokenizer, root, eos_token)
    names = input if isinstance(input, str) else ", ".join(input)
    options = Options(names, root, split, domain, text_key, text_documents, part_i_n, record)
    key = options.key(sources)
    staging_folder = root / ".prepare" / f"{split}-{key}{options.suffix}"
    if already_prepared(options, key, sources):
        shutil.rmtree(staging_folder, ignore_errors=True)  # a run that was killed just before its end leaves it
        _remove_if_empty(staging_folder.parent)
        log.info("%s (%s, part %s) is already prepared in %s: nothing to do", names, split, part, root)
        return
    if root.exists() and not root.is_dir():
        raise ValueError(f"output: {root} is a file: name a folder")
    made = [p for p in (root, *root.parents) if not p.exists()]
    staging_folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(staging_folder / "lock", wait=False):
            _run(options, key, sources, data, staging_folder, processes)
    finally:
        for folder in (staging_folder, staging_folder.parent, *made):
            _remove_if_empty(folder)


def _parse_part(part: str) -> tuple[int, int]:
    i, _, n = part.partition("/")
    if not (i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise ValueError(f"part must be i/n with 1 <= i <= n, like 2/8, got '{part}'")
    return int(i), int(n)


def _take_part(sources: list[Source], part: tuple[int, int]) -> list[Source]:
    i, n = part
    if n == 1 or all(s.kind == "hub" for s in sources):
        return sources
    if n > len(sources):
        raise ValueError(f"part: the input has {len(sources)} files, which cannot be dealt to {n} parts; use fewer")
    if any(s.kind == "hub" for s in sources):
        raise ValueError("part: files and Hub names cannot be split together; prepare them by themselves")
    return sources[i - 1 :: n]


def _tokenizer(option: str | None, root: Path, eos_token: str | None) -> tuple[bytes, TokenizerRecord]:
    own = root / "tokenizer.json"
    if option is None:
        if not own.is_file():
            raise ValueError(f"tokenizer: not given, and {own} does not exist; train one with `seqarch data tokenizer`")
        option = str(own)
    data = tokenizer_bytes(option)
    if own.is_file() and own.read_bytes() != data:
        raise ValueError(
            f"tokenizer: {option} is not the tokenizer of {root} ({own} differs); prepare into another folder"
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"tokenizer: {option} is not UTF-8, so no tokenizer.json") from error
    loaded = tokenizer_from_text(text, option)
    eos, eos_id = find_eos(loaded, eos_token)
    size = vocabulary_size(loaded)
    token_dtype(size)
    return data, TokenizerRecord(hash_bytes(data), size, eos, eos_id)


def _run(options: Options, key: str, sources: list[Source], tokenizer: bytes, folder: Path, processes: int) -> None:
    dtype = token_dtype(options.tokenizer.vocab_size)
    staging = Staging(folder, key, dtype)
    try:
        if not staging.journal.publishing:
            tokenizer_path = folder / "tokenizer.json"
            write_aside(tokenizer_path, tokenizer)
            task = Task(str(tokenizer_path), options.tokenizer.eos_id, dtype.str, options.text_key, options.domain)
            _tokenise(options, key, _take_part(sources, options.part), staging, task, processes)
            if not staging.journal.counts:
                raise ValueError(f"input: {options.input} holds no text; {staging.journal.empty} records were empty")
            staging.seal(options.split, options.suffix)
        publish(options, key, input_sizes(sources), staging, tokenizer)
    except BaseException as error:
        keep = staging.journal.publishing or _keep_committed(staging)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            rest = "run the same command again to go on" if keep else "run the same command again"
            raise ValueError(
                f"output: no space left for {options.root} ({error.strerror}): make room and {rest}"
            ) from error
        raise


def _keep_committed(staging: Staging) -> bool:
    """Cut the staging folder to its last commit, and remove it if there is none; says whether there is."""
    if (staging.folder / "journal.json").exists():
        staging.roll_back()
        return True
    staging.discard()
    return False


def _identity(source: Source) -> list:
    changed = 0 if source.kind == "hub" else os.stat(source.name).st_mtime_ns
    return [source.name, source.size, changed]


def _resume(staging: Staging, sources: list[Source]) -> Iterator[tuple[Source, Progress]]:
    """The sources that are left, each with where to go on."""
    journal = staging.journal
    done = len(journal.finished)
    if journal.finished != [_identity(s) for s in sources[:done]]:
        raise ValueError(
            f"input: a file has changed since the run was interrupted; delete {staging.folder} to start over"
        )
    if journal.current is not None and journal.current != _identity(sources[done]):
        log.warning("%s has changed since the run was interrupted: reading it again from its start", sources[done].name)
        staging.rewind_source()
    for i, source in enumerate(sources[done:]):
        yield source, journal.progress if i == 0 else Progress()


def _tokenise(options: Options, key: str, sources: list[Source], staging: Staging, task: Task, processes: int) -> None:
    manifest = load_manifest(options.root)
    left = list(_resume(staging, sources))
    done = sum(s.size for s in sources) - sum(s.size - p.consumed for s, p in left)
    total = sum(s.size for s in sources) or None
    last_commit = time.monotonic()
    pending: deque[tuple[Future[BlockTokens] | None, Source, Progress]] = deque()
    with (
        progress_bar(f"{options.split}: tokenising", unit="bytes", total=total, done=done) as advance,
        WorkerPool(processes, task) as pool,
    ):

        def take() -> None:
            """Write the result that comes next in the order of the input."""
            nonlocal last_commit
            future, source, progress = pending.popleft()
            staging.start_source(_identity(source))
            if future is None:
                staging.finish_source()
                return
            result = future.result()
            for domain, block in result.domains.items():
                if domain not in staging.journal.counts:
                    check_free(manifest, options, key, domain)
                staging.append(domain, block)
            staging.journal.empty += result.empty
            advance(progress.consumed - staging.journal.progress.consumed)
            staging.journal.progress = progress
            if time.monotonic() - last_commit >= COMMIT_SECONDS:
                staging.commit()
                last_commit = time.monotonic()

        for source, start in left:
            for block, progress in read_blocks(source, options.text_key, options.text_documents, start, options.part):
                pending.append((pool.submit(block), source, progress))
                while len(pending) > 2 * processes:
                    take()
            pending.append((None, source, Progress()))
        while pending:
            take()


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder in which at most a lock is left."""
    try:
        if {p.name for p in folder.iterdir()} <= {"lock"}:
            (folder / "lock").unlink(missing_ok=True)
            folder.rmdir()
    except OSError:  # gone, or in use by another process
        pass
