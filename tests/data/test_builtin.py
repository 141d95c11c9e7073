from __future__ import annotations

import ast
import json
import logging
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import seqarch.data.builtin as builtin
import seqarch.data.harvest as harvesting
from seqarch.data.builtin import builtin_corpus, cache_folder
from seqarch.data.corpus import Corpus
from seqarch.data.harvest import DOMAINS, Text, harvest, split_docstrings
from seqarch.data.settings import LimitedDomainDataModule


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Less of everything: a second instead of ten."""
    small = {"docs": 300_000, "readme": 200_000, "code": 150_000, "headers": 200_000, "legal": 200_000}
    patch.setattr(harvesting, "MAX_BYTES", small)
    patch.setattr(harvesting, "MAX_SOURCE_BYTES", 2_500_000)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


@pytest.fixture(scope="module")
def texts() -> dict[str, dict[str, list[Text]]]:
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        return harvest()


def test_split_by_package_and_deduplicated(texts: dict[str, dict[str, list[Text]]]) -> None:
    packages: dict[str, set[str]] = defaultdict(set)
    seen: set[str] = set()
    for split, domains in texts.items():
        assert set(domains) == set(DOMAINS)
        for domain, documents in domains.items():
            for document in documents:
                packages[split].add(document.package)
                assert document.domain == domain
                assert 200 <= len(document.text) <= 100_000
                normal = " ".join(document.text.lower().split())
                assert normal not in seen
                seen.add(normal)
    assert packages["train"]
    assert packages["test"]
    assert not packages["train"] & packages["test"]
    for domain in ("docs", "readme", "code"):
        sizes = {s: sum(len(t.text) for t in texts[s][domain]) for s in texts}
        assert 0.03 < sizes["test"] / (sizes["train"] + sizes["test"]) < 0.3


@pytest.mark.usefixtures("small")
def test_same_environment_same_text(texts: dict[str, dict[str, list[Text]]]) -> None:
    assert harvest() == texts


def test_domains_are_what_they_say(texts: dict[str, dict[str, list[Text]]]) -> None:
    everything = {d: texts["train"][d] + texts["test"][d] for d in DOMAINS}
    for document in everything["code"]:
        tree = ast.parse(document.text)
        assert ast.get_docstring(tree) is None
        assert not any(line.lstrip().startswith("#") for line in document.text.split("\n"))
    assert sum("#include" in t.text or "#pragma" in t.text or "#define" in t.text for t in everything["headers"]) > 5
    assert all(("licen" in t.text.lower() or "copyright" in t.text.lower()) for t in everything["legal"][:20])


def test_split_docstrings() -> None:
    source = '''"""Module prose that is long enough to be kept here."""
# a comment
import os


class A:
    """Short."""

    def f(self):
        """Function prose, also long enough to be kept for sure.

            Indented.
        Not.
        """
        return "# not a comment"

    def g(self):
        """Only a docstring, and long enough to be kept too."""
'''
    prose, code = split_docstrings(source, ast.parse(source))
    assert prose == (
        "Module prose that is long enough to be kept here.\n\n"
        "Function prose, also long enough to be kept for sure.\n\n    Indented.\nNot.\n\n"
        "Only a docstring, and long enough to be kept too."
    )
    assert "prose" not in code
    assert "comment\n" not in code.replace('not a comment"\n', "")
    namespace: dict = {}
    exec(code, namespace)
    assert namespace["A"]().f() == "# not a comment"
    assert namespace["A"]().g() is None


def test_built_once_and_cached(
    tmp_path: Path, texts: dict[str, dict[str, list[Text]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEQARCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(builtin, "harvest", lambda: texts)
    data = LimitedDomainDataModule("builtin", 64, 4, 2, train_domains=["docs", "readme"])
    data.prepare_data()
    data.setup("fit")
    assert data.vocab_size == 4096
    assert {"docs", "readme", "code"} <= set(data.val_domains)
    assert data.in_domain("docs")
    assert not data.in_domain("code")
    root = data.corpus.root
    assert {p.name for p in (tmp_path / "cache").iterdir()} == {root.name, f"{root.name}.lock"}
    monkeypatch.setattr(builtin, "_build", lambda *a: pytest.fail("built twice"))
    assert builtin_corpus() == root


def test_a_domain_with_too_little_is_left_out_aloud(
    tmp_path: Path,
    texts: dict[str, dict[str, list[Text]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("SEQARCH_CACHE", str(tmp_path / "cache"))
    without = {split: {**domains, "headers": domains["headers"][:1]} for split, domains in texts.items()}
    monkeypatch.setattr(builtin, "harvest", lambda: without)
    with caplog.at_level(logging.WARNING):
        corpus = Corpus(builtin_corpus(vocab_size=512))
    assert "domain headers is left out" in caplog.text
    assert "headers" not in corpus.splits["train"]
    assert "docs" in corpus.splits["train"]


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQARCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(builtin, "harvest", lambda: {s: {d: [] for d in DOMAINS} for s in ("train", "test")})
    with pytest.raises(ValueError, match="builtin: this Python installation holds too little text"):
        builtin_corpus()
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQARCH_CACHE", "/a")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("SEQARCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/b/seqarch")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "seqarch"


@pytest.mark.slow
def test_two_processes_build_one_corpus(tmp_path: Path) -> None:
    code = "from seqarch.data.builtin import builtin_corpus; print(builtin_corpus())"
    environment = {**os.environ, "SEQARCH_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = {p.communicate()[0].strip() for p in processes}
    (root,) = outputs
    corpus = Corpus(Path(root))
    corpus.verify()
    assert set(corpus.splits["test"]) == set(DOMAINS)
    manifest = json.loads((Path(root) / "manifest.json").read_text())
    assert len(manifest["runs"]) == 2
