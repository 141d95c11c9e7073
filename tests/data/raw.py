"""Raw text for tests, in SlimPajama's layout."""

from __future__ import annotations

import json
import random
from pathlib import Path

LABELS = {"cc": "RedPajamaCommonCrawl", "c4": "RedPajamaC4", "github": "RedPajamaGithub"}
WORDS = [
    *("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "naïve", "東京", "cats"),
    *("écoutent", "la", "musique;", "x", "=", "f(y)\n\n\tend", "12345"),
]


def make_records(n: int, seed: int, domains: tuple[str, ...] = ("cc", "c4", "github")) -> list[dict]:
    """Records in SlimPajama's layout, with lengths from a few words to a few hundred."""
    rng = random.Random(seed)
    records = []
    for i in range(n):
        words = rng.choices(WORDS, k=rng.choice((3, 20, 60, 300)))
        label = LABELS[domains[i % len(domains)]]
        records.append({"text": f"{i} " + " ".join(words), "meta": {"redpajama_set_name": label}})
    return records


def write_jsonl(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    return path
