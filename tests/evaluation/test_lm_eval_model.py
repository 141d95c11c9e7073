"""Through lm-eval: against its own model for transformers, and what must not change a score."""

from functools import partial

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate

from seqarch.evaluation.lm_eval_model import SeqarchLM
from seqarch.evaluation.tasks import Tasks
from seqarch_attention import Attention
from seqarch_mamba import Mamba2
from seqarch_rwkv import RWKV7
from tests.evaluation.local_tasks import write_tasks
from tests.evaluation.trained_models import text, trained

MIXERS = {
    "attention": partial(Attention, n_heads=2),
    "mamba2": partial(Mamba2, head_dim=16, state_dim=8),
    "rwkv7": partial(RWKV7, head_dim=16),
}


def llama_of(model):
    """transformers' Llama with the weights of our Transformer++."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=model.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip
    names = {"embedding": "model.embed_tokens", "head": "lm_head", "norm": "model.norm"}
    parts = {
        "mixer_norm": "input_layernorm", "mixer": "self_attn", "channel_norm": "post_attention_layernorm",
        "channel_mixer": "mlp",
    }  # fmt: skip
    weights = {}
    for name, weight in model.state_dict().items():
        first, *rest = name.split(".")
        if first == "blocks":
            layer, part, *rest = rest
            weights[".".join(["model.layers", layer, parts[part], *rest])] = weight
        else:
            weights[".".join([names[first], *rest])] = weight
    llama = LlamaForCausalLM(config)
    llama.load_state_dict(weights)
    return llama.eval()


def requests_of(kind, pairs):
    return [Instance(request_type=kind, doc={}, arguments=pair, idx=i) for i, pair in enumerate(pairs)]


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("add_bos_token", [True, False])
@pytest.mark.usefixtures("no_cache")
def test_agrees_with_hf(tmp_path, add_bos_token):
    from lm_eval.models.huggingface import HFLM
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    ours = trained(MIXERS["attention"])
    theirs = type(ours.tokenizer).from_str(ours.tokenizer.to_str())
    theirs.post_processor = TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", ours.eos_id)])
    hf = HFLM(
        llama_of(ours.model),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=theirs, bos_token="<|endoftext|>", eos_token="<|endoftext|>", pad_token="<|endoftext|>"
        ),
        batch_size=1,  # of rows of different lengths it pads the left for generation
        max_length=48,
        add_bos_token=add_bos_token,
    )
    lm = SeqarchLM(ours, batch_size=3, max_length=48, add_bos_token=add_bos_token)
    manager = Tasks(include_path=str(write_tasks(tmp_path)), include_defaults=False)
    # lm-eval's own adds a second token of that kind to a text that its tokenizer begins with one
    names = ["local_choice", "local_generate"] + ([] if add_bos_token else ["local_rolling"])
    a, b = ({name: answers(model, name, manager) for name in names} for model in (lm, hf))
    assert a["local_generate"] == b["local_generate"]
    assert len(set(a["local_generate"])) > 3
    assert [greedy for _, greedy in a["local_choice"]] == [greedy for _, greedy in b["local_choice"]]
    for name in set(names) - {"local_generate"}:
        ours_, theirs_ = (torch.tensor([x[0] if isinstance(x, tuple) else x for x in f[name]]) for f in (a, b))
        assert ours_.std() > 1
        torch.testing.assert_close(ours_, theirs_, atol=1e-4, rtol=0)


def answers(model, task, manager):
    """What the model answered to each request of a task."""
    found = simple_evaluate(model, tasks=[task], task_manager=manager, bootstrap_iters=0)
    assert found is not None
    samples = found["samples"][task]
    assert len(samples) == 7
    return [answer for sample in samples for response in sample["resps"] for answer in response]


PAIRS = [(text(3 + 5 * i, i), " " + text(1 + i % 3, 50 + i)) for i in range(6)]


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_batches_change_nothing(mixer):
    alone, together = (SeqarchLM(trained(mixer), batch_size=n) for n in (1, 4))
    for kind in ("loglikelihood", "loglikelihood_rolling"):
        requests = requests_of(kind, PAIRS if kind == "loglikelihood" else [(context,) for context, _ in PAIRS])
        a, b = (torch.tensor(getattr(lm, kind)(requests), dtype=torch.float64) for lm in (alone, together))
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)
    requests = requests_of("generate_until", [(context, {"max_gen_toks": 6}) for context, _ in PAIRS])
    assert alone.generate_until(requests) == together.generate_until(requests)


def test_log_likelihoods_are_those_of_the_whole_text():
    """By the definition, one text at a time, in float64."""
    model = trained(MIXERS["attention"])
    lm = SeqarchLM(model)
    model.model.double()
    for context, continuation in [*PAIRS, ("", text(3, 9))]:
        [(found, _)] = lm.loglikelihood(requests_of("loglikelihood", [(context, continuation)]))
        whole = [model.eos_id, *model.tokenizer.encode(context + continuation).ids]
        start = 1 + len(model.tokenizer.encode(context).ids)
        log_p = model.model(torch.tensor([whole]))[0].log_softmax(-1)[0]
        assert found == pytest.approx(sum(log_p[t - 1, whole[t]].item() for t in range(start, len(whole))), abs=1e-4)


def test_requests_that_differ_in_the_last_token_share_a_row(monkeypatch):
    lm = SeqarchLM(trained(MIXERS["attention"]))
    calls = []
    logits = lm._logits
    monkeypatch.setattr(lm, "_logits", lambda rows: calls.append(len(rows)) or logits(rows))
    ids = [lm.trained.tokenizer.encode(letter).ids for letter in "abcd"]
    together = lm._scores([([5, 6, 7], i) for i in ids], disable_tqdm=True)
    assert calls == [1]
    assert together == [lm._scores([([5, 6, 7], i)], disable_tqdm=True)[0] for i in ids]
    assert len(set(together)) == 4


def test_a_long_context_loses_its_beginning():
    model = trained(MIXERS["attention"])
    context, continuation = list(range(20, 60)), [1, 2, 3]
    cut = SeqarchLM(model, max_length=10)._scores([(context, continuation)], disable_tqdm=True)
    assert cut == SeqarchLM(model)._scores([(context[-8:], continuation)], disable_tqdm=True)
    assert cut != SeqarchLM(model)._scores([(context, continuation)], disable_tqdm=True)


def test_a_continuation_longer_than_the_context_is_refused():
    lm = SeqarchLM(trained(MIXERS["attention"]), max_length=2)
    with pytest.raises(ValueError, match=r"max_length \(2\) is below a continuation's 3 tokens"):
        lm._scores([([1], [1, 2, 3])], disable_tqdm=True)


def test_rolling_windows_cover_each_token_once():
    """With a window of 1 token every token is scored after the one before it."""
    model = trained(MIXERS["attention"])
    string = text(12, 3)
    [found] = SeqarchLM(model, max_length=2).loglikelihood_rolling(requests_of("loglikelihood_rolling", [(string,)]))
    ids = [model.eos_id, *model.tokenizer.encode(string).ids]
    expected = 0.0
    for start in range(0, len(ids) - 1, 2):
        window = ids[start : start + 3] if start + 2 < len(ids) else ids[-3:]
        log_p = model.model(torch.tensor([window[:-1]]))[0].log_softmax(-1)[0]
        new = min(2, len(ids) - 1 - start)
        expected += sum(log_p[t, window[t + 1]].item() for t in range(2 - new, 2))
    assert found == pytest.approx(expected, abs=1e-4)


def test_generation_stops_before_the_stopping_text():
    lm = SeqarchLM(trained(MIXERS["attention"]))
    [(prompt, _), *_] = PAIRS
    [free] = lm.generate_until(requests_of("generate_until", [(prompt, {"max_gen_toks": 20, "until": []})]))
    stop = free[5:8]
    [stopped] = lm.generate_until(requests_of("generate_until", [(prompt, {"max_gen_toks": 20, "until": [stop]})]))
    assert stopped == free[: free.index(stop)]


def test_sampling_follows_the_seed():
    lm = SeqarchLM(trained(MIXERS["attention"]))
    options = {"max_gen_toks": 20, "do_sample": True, "temperature": 5.0}
    requests = requests_of("generate_until", [(PAIRS[0][0], options)])
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(lm.generate_until(requests)[0])
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": "auto"}, "batch_size must be a number, got 'auto'"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"max_batch_size": 8}, "max_batch_size is not supported"),
        ({"max_length": 1}, "max_length must be at least 2"),
        ({"precision": "16"}, "precision must be one of 32-true, bf16-mixed"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        SeqarchLM(trained(MIXERS["attention"]), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "generation option num_beams is not supported"),
        ({"max_gen_toks": 2048}, r"max_length \(2048\) leaves no room before max_gen_toks \(2048\)"),
    ],
)
def test_bad_generation_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        SeqarchLM(trained(MIXERS["attention"])).generate_until(requests_of("generate_until", [("a", options)]))


def test_bfloat16_is_near():
    model = trained(MIXERS["mamba2"])
    a, b = (
        torch.tensor(SeqarchLM(model, precision=p).loglikelihood(requests_of("loglikelihood", PAIRS)))[:, 0]
        for p in ("32-true", "bf16-mixed")
    )
    assert (a != b).all()
    torch.testing.assert_close(a, b, rtol=0.05, atol=0.5)
