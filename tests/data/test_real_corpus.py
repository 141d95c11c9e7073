"""On a small real corpus in SlimPajama's layout, where there is one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import zstandard

from seqarch.data import LimitedDomainDataModule
from seqarch.data.prepare import prepare
from seqarch.data.tokenizer import load_tokenizer, train_tokenizer

CORPUS = Path(os.environ.get("SEQARCH_TEST_CORPUS", Path(__file__).parents[3] / "shared" / "corpus"))

pytestmark = pytest.mark.skipif(
    not (CORPUS / "test").is_dir(), reason=f"no corpus in {CORPUS}; name one in SEQARCH_TEST_CORPUS"
)


def test_some_domains_of_the_test_split(tmp_path: Path) -> None:
    cc, c4, wikipedia = (str(CORPUS / "test" / f"{name}.jsonl.zst") for name in ("cc", "c4", "wikipedia"))
    train_tokenizer([cc, c4], tmp_path, vocab_size=1024, max_bytes=500_000)
    prepare([cc, wikipedia], tmp_path, split="test", processes=2)
    prepare(c4, tmp_path, split="train", processes=2)
    data = LimitedDomainDataModule(tmp_path, 512, 4, 4, train_domains=["c4"], val_batch_size=8)
    data.prepare_data()
    data.setup("fit")
    assert data.val_domains == ["cc", "wikipedia"]
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    for domain in data.val_domains:
        raw = zstandard.decompress((CORPUS / "test" / f"{domain}.jsonl.zst").read_bytes(), max_output_size=1 << 28)
        texts = [json.loads(line)["text"] for line in raw.decode().split("\n") if line]
        stream = data.corpus.stream("test", domain, "")
        assert stream.n_documents == len(texts)
        assert data.corpus.recorded_bytes("test", domain) == sum(len(t.encode()) for t in texts)
        for i in range(0, len(texts), max(1, len(texts) // 5)):
            ids = stream.document(i)
            assert ids[-1] == data.eos_id
            assert tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) == texts[i]
