"""Loss by position: against whole forward passes, and over which documents."""

import json
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from seqarch.cli import main
from seqarch.data.corpus import Corpus
from seqarch.evaluation.position import bin_edges, long_documents, loss_by_position, token_losses
from seqarch_attention import Attention
from seqarch_mamba import Mamba2
from tests.evaluation.trained_models import trained, write_run


@pytest.mark.parametrize(
    "mixer", [partial(Attention, n_heads=2), partial(Mamba2, head_dim=16, state_dim=8)], ids=["attention", "mamba2"]
)
@pytest.mark.parametrize("chunk", [7, 40, 64])
def test_losses_are_those_of_one_forward_pass(mixer, chunk):
    model = trained(mixer).model
    tokens = torch.randint(300, (2, 41), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, _ = model(tokens[:, :-1])
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(2, 40)
    torch.testing.assert_close(token_losses(model, tokens, chunk), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 3, 17, 512, 100_000])
def test_bins_cover_all_positions_and_grow(length):
    edges = bin_edges(length)
    assert edges[0] == 0
    assert edges[-1] == length
    assert all(b > a for a, b in pairwise(edges))
    assert all(b <= 1.5 * a + 1 for a, b in pairwise(edges[1:]))
    assert len(edges) <= 2 * length.bit_length() + 2


def fitting(corpus_path):
    """A model with the corpus's tokenizer."""
    corpus = Corpus(corpus_path)
    model = trained(partial(Attention, n_heads=2), tokenizer_path=corpus.tokenizer_path)
    return corpus, model


def test_curves_are_means_over_the_long_documents(corpus_path):
    corpus, model = fitting(corpus_path)
    stream = corpus.stream("test", "cc", "domains")
    lengths = sorted(stream.document_length(i) for i in range(stream.n_documents))
    length = lengths[len(lengths) // 2]
    expected = [i for i in range(stream.n_documents) if stream.document_length(i) >= length]
    assert 1 < len(expected) < len(lengths)
    assert long_documents(stream, length, 10_000) == expected
    some = long_documents(stream, length, 2)
    assert len(some) == 2
    assert set(some) <= set(expected)

    found = loss_by_position(model, corpus, length, ["cc"], 10_000, batch_size=3, chunk=16)
    losses = []
    for i in expected:
        tokens = torch.tensor([[model.eos_id, *stream.document(i)[:length]]])
        with torch.no_grad():
            logits, _ = model.model(tokens[:, :-1])
        losses.append(F.cross_entropy(logits[0], tokens[0, 1:], reduction="none").double())
    curve = found["domains"]["cc"]
    assert curve["documents"] == len(expected)
    for j, (start, end) in enumerate(zip(found["starts"], found["ends"], strict=True)):
        means = torch.stack([loss[start:end].mean() for loss in losses])
        assert curve["loss"][j] == pytest.approx(means.mean().item(), rel=1e-4)
        assert curve["stderr"][j] == pytest.approx(means.std().item() / len(means) ** 0.5, rel=1e-3)


def test_what_does_not_fit_is_refused(corpus_path):
    corpus, model = fitting(corpus_path)
    with pytest.raises(ValueError, match=r"length: no test document of .* has 99999 tokens; the longest has \d+"):
        loss_by_position(model, corpus, 99_999)
    with pytest.raises(ValueError, match="has another tokenizer than the model"):
        loss_by_position(trained(partial(Attention, n_heads=2)), corpus, 8)


def test_the_command(tmp_path, corpus_path, capsys):
    run = write_run(tmp_path / "run", Corpus(corpus_path).tokenizer_path)
    main(["position", str(run), "--data", str(corpus_path), "--length", "16", "--device", "cpu", "--domains", "cc"])
    found = json.loads((run / "results" / "position-step1.json").read_text())
    assert list(found["domains"]) == ["cc"]
    assert found["ends"][-1] == 16
    assert (run / "results" / "position-step1.png").read_bytes().startswith(b"\x89PNG")
    assert "cc (" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["position", str(run)])
    assert "does not say on which corpus it was trained; name one with --data" in capsys.readouterr().err
