"""How fast `seqarch data prepare` is against the tokenizer alone, and how its memory grows with the input.

    python benchmarks/prepare.py --text text.jsonl.zst [--tokenizer tokenizer.json]

Speed: tokens a second of `tokenizers`' ``encode_batch_fast`` over texts that are in memory (with its own threads), and
of prepare from the files to the published shards, in turn on the same text, medians. Prepare's start of processes and
its checksums count. Memory: the largest resident set of prepare with all its processes, for inputs of growing size.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from seqarch.data.manifest import load_manifest
from seqarch.data.prepare import prepare
from seqarch.data.reading import read_documents, resolve_inputs
from seqarch.data.tokenizer import load_tokenizer, train_tokenizer

BATCH = 1000


def bare(texts: list[str], tokenizer_path: Path) -> tuple[int, float]:
    """Tokens and seconds of `encode_batch_fast` alone."""
    tokenizer = load_tokenizer(tokenizer_path)
    tokens = 0
    start = time.perf_counter()
    for i in range(0, len(texts), BATCH):
        tokens += sum(len(e) for e in tokenizer.encode_batch_fast(texts[i : i + BATCH], add_special_tokens=False))
    return tokens, time.perf_counter() - start


def prepared(files: list[str], tokenizer_path: Path, processes: int) -> tuple[int, float]:
    """Tokens (without end-of-text ids, as for `bare`) and seconds of prepare."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        prepare(files, Path(folder) / "out", tokenizer=str(tokenizer_path), domain="x", processes=processes)
        seconds = time.perf_counter() - start
        manifest = load_manifest(Path(folder) / "out")
        assert manifest is not None
        (shard,) = manifest.splits["train"]["x"]
        return shard.tokens - shard.documents, seconds


def resident_mib(pid: int) -> float:
    """Resident memory of a process and its descendants, from /proc."""
    children: dict[int, list[int]] = {}
    pages: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(") ")[2].split()
                pages[int(entry.name)] = int((entry / "statm").read_text().split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    todo, total = [pid], 0
    while todo:
        p = todo.pop()
        total += pages.get(p, 0)
        todo += children.get(p, [])
    return total * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_memory(files: list[str], tokenizer_path: Path, processes: int) -> float:
    """The largest resident set (MiB) of prepare in a process of its own, with its children."""
    code = (
        "import sys; from seqarch.data.prepare import prepare\n"
        "prepare(sys.argv[4:], sys.argv[1], tokenizer=sys.argv[2], domain='x', processes=int(sys.argv[3]))"
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, f"{folder}/out", str(tokenizer_path), str(processes), *files]
        child = subprocess.Popen(command)
        peak = 0.0
        while child.poll() is None:
            peak = max(peak, resident_mib(child.pid))
            time.sleep(0.05)
        if child.returncode:
            raise RuntimeError("prepare failed")
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", required=True, help="files, folders or globs")
    parser.add_argument("--tokenizer", help="a tokenizer.json; one of 8192 ids is trained on the text if not given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=24.0, help="how much of the text to use for the speed")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--memory", type=int, nargs="*", default=[1, 4, 16], help="sizes, as multiples of megabytes / 4"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_path = Path(folder) / "tokenizer.json"
        if options.tokenizer:
            shutil.copy(options.tokenizer, tokenizer_path)
        else:
            train_tokenizer(options.text, tokenizer_path, vocab_size=8192, max_bytes=10_000_000)
        texts: list[str] = []
        size = 0
        for document in read_documents(resolve_inputs(options.text), "text", "file", domain="x"):
            texts.append(document.text)
            size += document.n_bytes
            if size >= options.megabytes * 1e6:
                break
        raw = Path(folder) / "raw.jsonl"
        raw.write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts), encoding="utf-8")
        rates: dict[str, list[float]] = {"bare": [], "prepare": []}
        for _ in range(options.rounds):
            tokens, seconds = bare(texts, tokenizer_path)
            rates["bare"].append(tokens / seconds)
            again, seconds = prepared([str(raw)], tokenizer_path, options.processes)
            assert again == tokens, (again, tokens)
            rates["prepare"].append(tokens / seconds)
        ratios = [p / b for p, b in zip(rates["prepare"], rates["bare"], strict=True)]
        medians = {k: statistics.median(v) for k, v in rates.items()}
        result: dict[str, object] = {
            "megabytes": round(size / 1e6, 1),
            "tokens": tokens,
            "processes": options.processes,
            "bare_tokens_per_second": round(medians["bare"]),
            "prepare_tokens_per_second": round(medians["prepare"]),
            "ratio_of_medians": round(medians["prepare"] / medians["bare"], 3),
            "ratios": [round(r, 3) for r in ratios],
        }
        memory = {}
        quarter = texts[: max(1, len(texts) // 4)]
        block = "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in quarter)
        for multiple in options.memory:
            with raw.open("w", encoding="utf-8") as f:
                for _ in range(multiple):
                    f.write(block)
            memory[f"{raw.stat().st_size / 1e6:.0f} MB"] = round(
                peak_memory([str(raw)], tokenizer_path, options.processes)
            )
        result["peak_resident_mib_by_input"] = memory
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
