"""Names of text domains: SlimPajama's labels and the short names used everywhere else."""

from __future__ import annotations

import re

REDPAJAMA_DOMAINS = {
    "RedPajamaCommonCrawl": "cc",
    "RedPajamaC4": "c4",
    "RedPajamaGithub": "github",
    "RedPajamaBook": "book",
    "RedPajamaArXiv": "arxiv",
    "RedPajamaWikipedia": "wikipedia",
    "RedPajamaStackExchange": "stackexchange",
}
"""``meta.redpajama_set_name`` of a SlimPajama record, and the domain's short name."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def check_domain_name(name: str, option: str = "domain") -> str:
    """Return ``name`` if it can be a file name and a metric name; ``ValueError`` names ``option`` otherwise."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{option}: '{name}' cannot name a domain: use letters, digits, '-' and '_', like 'cc'")
    return name


def domain_of(record: dict) -> str:
    """The domain that a record's ``meta`` names: ``redpajama_set_name`` (SlimPajama), or ``domain`` with a short name.

    Raises:
        ValueError: If it names none, or one that is not known.
    """
    meta = record.get("meta")
    if isinstance(meta, dict):
        label = meta.get("redpajama_set_name")
        if label is not None:
            if isinstance(label, str) and label in REDPAJAMA_DOMAINS:
                return REDPAJAMA_DOMAINS[label]
            known = ", ".join(REDPAJAMA_DOMAINS)
            raise ValueError(f"unknown meta.redpajama_set_name '{label}' (known: {known}); or pass --domain NAME")
        if isinstance(meta.get("domain"), str):
            return check_domain_name(meta["domain"], "meta.domain")
    raise ValueError("the record names no domain in meta.redpajama_set_name or meta.domain; pass --domain NAME")
