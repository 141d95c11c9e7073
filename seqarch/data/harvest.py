"""Text from the user's own Python installation: what the built-in corpus is made of.

Files are read, never imported. Which ones, and into which split a package goes, is decided by hashes of names, so that
the same installation always gives the same text.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import inspect
import os
import re
import sysconfig
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOMAINS = ("docs", "readme", "code", "headers", "legal")
MAX_BYTES = {"docs": 4_000_000, "readme": 2_000_000, "code": 1_500_000, "headers": 1_500_000, "legal": 1_000_000}
"""Where harvesting of a domain stops, so that building takes seconds whatever is installed."""
PACKAGE_SHARE = 0.15
"""No package gives more than this share of a domain's ``MAX_BYTES``."""
MAX_SOURCE_BYTES = 48_000_000
MIN_CHARS, MAX_CHARS = 200, 100_000
TEST_SHARE = 0.1
MIN_TEST_BYTES = 8_000
_SKIPPED_FOLDERS = {
    "test",
    "tests",
    "testing",
    "__pycache__",
    "site-packages",
    "idlelib",
    "lib2to3",
    "_vendor",
    "vendor",
}
_HEADER_SUFFIXES = {".h", ".hh", ".hpp", ".hxx", ".cuh"}
_LEGAL_NAME = re.compile(r"(licen[cs]e|copying|notice|eula)", re.IGNORECASE)
_LEGAL_SUFFIXES = {"", ".txt", ".md", ".rst"}


class Text(NamedTuple):
    """A document of a domain, and the package it came from."""

    domain: str
    package: str
    text: str


class _File(NamedTuple):
    package: str
    name: str
    path: Path


def installed_distributions() -> list[importlib.metadata.Distribution]:
    """The distributions in this interpreter's site-packages, by name, without this one."""
    folders = sorted({sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]})
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions(path=folders):
        name = distribution.metadata["Name"]
        if name and name.lower() != "seqarch":
            found.setdefault(name.lower().replace("_", "-"), distribution)
    return [found[name] for name in sorted(found)]


def harvest() -> dict[str, dict[str, list[Text]]]:
    """Documents by split (``train``, ``test``) and domain: deduplicated, split by package, ordered by hashes."""
    sources = _list_files()
    texts = [
        *_python(sources["python"]),
        *_readmes(),
        *_plain("headers", sources["headers"]),
        *_plain("legal", sources["legal"]),
    ]
    kept = _deduplicate(texts)
    in_test = _test_packages(kept)
    out: dict[str, dict[str, list[Text]]] = {split: {d: [] for d in DOMAINS} for split in ("train", "test")}
    for text in kept:
        out["test" if text.package in in_test else "train"][text.domain].append(text)
    return out


def _list_files() -> dict[str, list[_File]]:
    files: dict[str, list[_File]] = {"python": [], "headers": [], "legal": []}

    def add(package: str, root: str, parts: tuple[str, ...], name: str) -> None:
        kind = _kind(name)
        if kind is None or ".." in parts or _SKIPPED_FOLDERS & set(parts):
            return
        if kind == "headers":  # they come from few distributions: a folder counts as a package
            package = f"{package}:{'/'.join(parts[:3])}"
        files[kind].append(_File(package, "/".join((*parts, name)), Path(root, *parts, name)))

    for distribution in installed_distributions():
        package = distribution.metadata["Name"].lower().replace("_", "-")
        root = str(distribution.locate_file(""))
        for file in distribution.files or []:
            add(package, root, file.parts[:-1], file.name)
    for origin, folder in (("stdlib", "stdlib"), ("python", "include")):
        root = sysconfig.get_paths()[folder]
        for parent, folders, names in os.walk(root):
            folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
            parts = Path(parent).relative_to(root).parts
            for name in sorted(names):
                module = parts[0] if parts else os.path.splitext(name)[0]
                add(f"stdlib:{module}" if origin == "stdlib" else origin, root, parts, name)
    for listed in files.values():
        listed.sort(key=lambda f: _rank(f.package, f.name))
    return files


def _kind(name: str) -> str | None:
    """What a file is good for, by its name."""
    suffix = os.path.splitext(name)[1].lower()
    if suffix == ".py":
        return "python"
    if suffix in _HEADER_SUFFIXES:
        return "headers"
    return "legal" if suffix in _LEGAL_SUFFIXES and _LEGAL_NAME.search(name) else None


def _rank(*names: str) -> bytes:
    return hashlib.blake2b("\0".join(names).encode("utf-8", "surrogateescape"), digest_size=8).digest()


def _read(path: Path) -> str | None:
    try:
        if path.stat().st_size > 4 * MAX_CHARS:
            return None
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


class _Budget:
    """How much a domain still takes, in all and of each package."""

    def __init__(self, domain: str) -> None:
        self.left = MAX_BYTES[domain]
        self.share = int(MAX_BYTES[domain] * PACKAGE_SHARE)
        self.used: defaultdict[str, int] = defaultdict(int)

    def full(self, package: str) -> bool:
        return self.left <= 0 or self.used[package] >= self.share

    def take(self, package: str, text: str) -> bool:
        if self.full(package):
            return False
        self.left -= len(text)
        self.used[package] += len(text)
        return True


def _fits(text: str) -> bool:
    """Whether a text is of a useful length, and text at all: a lone surrogate cannot be encoded."""
    if not MIN_CHARS <= len(text) <= MAX_CHARS:
        return False
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def _python(files: list[_File]) -> Iterator[Text]:
    """Docstrings of each module as one document, and its code without them as another."""
    docs, code = _Budget("docs"), _Budget("code")
    left = MAX_SOURCE_BYTES
    for file in files:
        if left <= 0 or (docs.left <= 0 and code.left <= 0):
            return
        if docs.full(file.package) and code.full(file.package):
            continue
        source = _read(file.path)
        if source is None:
            continue
        left -= len(source)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes and the like, in code that is not ours
                tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            continue
        prose, rest = split_docstrings(source, tree)
        if _fits(prose) and docs.take(file.package, prose):
            yield Text("docs", file.package, prose)
        if _fits(rest) and code.take(file.package, rest):
            yield Text("code", file.package, rest)


def split_docstrings(source: str, tree: ast.Module) -> tuple[str, str]:
    """The docstrings of a module, joined by blank lines, and its source without them and without comment lines."""
    lines = source.split("\n")
    prose = []
    for node in _definitions(tree):
        first = node.body[0]
        if not (
            isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
        ):
            continue
        text = inspect.cleandoc(first.value.value).strip()
        if len(text) >= 40:
            prose.append((first.lineno, text))
        end = first.end_lineno or first.lineno
        alone = len(node.body) > 1 or isinstance(node, ast.Module)
        lines[first.lineno - 1] = "" if alone else " " * first.col_offset + "..."
        for i in range(first.lineno, end):
            lines[i] = ""
    kept = [line.rstrip() for line in lines if not line.lstrip().startswith("#")]
    code = re.sub(r"\n{3,}", "\n\n\n", "\n".join(kept)).strip("\n") + "\n"
    return "\n\n".join(text for _, text in sorted(prose)), code


_Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _definitions(tree: ast.Module) -> Iterator[_Definition]:
    """The module, its classes and functions. Looks into statements only, which is much faster than `ast.walk`."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, _Definition) and node.body:
            yield node
        for block in ("body", "orelse", "finalbody", "handlers"):
            children = getattr(node, block, ())
            if isinstance(children, list):
                todo += children


def _readmes() -> Iterator[Text]:
    budget = _Budget("readme")
    for distribution in installed_distributions():
        metadata = distribution.metadata
        package = metadata["Name"].lower().replace("_", "-")
        payload = getattr(metadata, "get_payload", str)()  # where the description is since metadata 2.1
        text = payload.strip() if isinstance(payload, str) else ""
        if _fits(text) and budget.take(package, text):
            yield Text("readme", package, text)


def _plain(domain: str, files: list[_File]) -> Iterator[Text]:
    budget = _Budget(domain)
    for file in files:
        if not budget.full(file.package):
            text = _read(file.path)
            if text is not None and _fits(text) and budget.take(file.package, text):
                yield Text(domain, file.package, text)


def _identity(text: Text) -> bytes:
    """Equal for texts that differ in blanks and case only; for licences, also in who holds the copyright."""
    lines = text.text.lower().splitlines()
    if text.domain == "legal":
        lines = [line for line in lines if "copyright" not in line]
    return hashlib.blake2b(" ".join(" ".join(lines).split()).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _deduplicate(texts: list[Text]) -> list[Text]:
    seen: set[bytes] = set()
    kept = []
    for text in texts:
        identity = _identity(text)
        if identity not in seen:
            seen.add(identity)
            kept.append(text)
    return kept


def _test_packages(texts: list[Text]) -> set[str]:
    """Packages for the test split: by hash, until each domain has about ``TEST_SHARE`` of its text there.

    A package belongs to one split as a whole, over all domains.
    """
    total: defaultdict[str, int] = defaultdict(int)
    by_package: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for text in texts:
        total[text.domain] += len(text.text)
        by_package[text.package][text.domain] += len(text.text)
    tested: defaultdict[str, int] = defaultdict(int)
    chosen: set[str] = set()
    for package in sorted(by_package, key=lambda p: _rank("test", p)):
        sizes = by_package[package]
        wanted = any(tested[d] < TEST_SHARE * total[d] for d in sizes)
        fits = all(tested[d] + n <= 2.5 * TEST_SHARE * total[d] for d, n in sizes.items())
        if wanted and fits:
            chosen.add(package)
            for domain, n in sizes.items():
                tested[domain] += n
    return chosen
