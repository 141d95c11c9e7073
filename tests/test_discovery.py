"""Plugins that are whole, broken, or at odds with each other."""

import sys
import types

import pytest

from seqarch import discovery


@pytest.fixture
def module(monkeypatch):
    def make(name, **content):
        created = types.ModuleType(name)
        for key, value in content.items():
            setattr(created, key, value)
        monkeypatch.setitem(sys.modules, name, created)

    return make


def test_first_party_mixers_are_found_by_entry_point_and_by_class():
    from seqarch_attention import Attention

    assert discovery.find("attention") is discovery.find("Attention") is Attention
    names = {p.name: p.class_name for p in discovery.plugins()}
    assert names.items() >= {
        "attention": "Attention", "top1_element": "Top1Element", "top1_chunk": "Top1Chunk"
    }.items()  # fmt: skip


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError, match="no mixer is called 'Top1Chnk': did you mean 'Top1Chunk'"):
        discovery.find("Top1Chnk")


@pytest.mark.parametrize(
    ("value", "content", "problem"),
    [
        ("no_such_module:Mixer", {}, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("plug:Missing", {}, "AttributeError"),
        ("plug:Mixer", {"Mixer": int}, "plug:Mixer is no subclass of seqarch.TokenMixer"),
        ("plug:Mixer", {"Mixer": "text"}, "is no subclass of seqarch.TokenMixer"),
    ],
)
def test_a_broken_plugin_costs_a_warning_and_an_error_when_chosen(installed, module, value, content, problem):
    module("plug", **content)
    installed(("seqarch", "attention", "seqarch_attention:Attention"), ("third-party", "bad", value))
    with pytest.warns(UserWarning, match=f"mixer 'bad' of third-party 1.0 cannot be used: .*{problem}"):
        assert [p.mixer is None for p in discovery.plugins()] == [False, True]
    with pytest.raises(ValueError, match=r"mixer 'bad' of third-party 1\.0 cannot be used"):
        discovery.find("bad")
    discovery.find("attention")


def test_a_class_that_misses_methods_is_named_with_them(installed, module):
    from seqarch import TokenMixer

    class Half(TokenMixer):
        def forward(self, x, *, cu_seqlens=None, state=None):
            return x, state

    module("plug", Half=Half)
    installed(("third-party", "half", "plug:Half"))
    with pytest.warns(UserWarning, match="Half does not define flops, init_state, reset_parameters"):
        discovery.plugins()


def test_two_plugins_with_one_name_are_an_error_that_names_both(installed):
    installed(
        ("one", "attention", "seqarch_attention:Attention"),
        ("two", "attention", "seqarch_attention:Attention"),
    )
    with pytest.warns(UserWarning, match="'attention' is defined by one 1.0 and by two 1.0: uninstall one"):
        discovery.plugins()
    with pytest.raises(ValueError, match="uninstall one"):
        discovery.find("attention")


def test_a_plugin_that_leaves_the_process_is_only_broken(installed, tmp_path, monkeypatch):
    (tmp_path / "leaver.py").write_text("import sys; sys.exit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    installed(("third-party", "leaver", "leaver:M"))
    with pytest.warns(UserWarning, match="importing it raised SystemExit: 3"):
        discovery.plugins()


def test_a_rival_that_cannot_be_loaded_is_no_rival(installed):
    from seqarch_attention import Attention

    installed(
        ("a-third-party", "attention", "no_such:Attention"), ("seqarch", "attention", "seqarch_attention:Attention")
    )
    with pytest.warns(UserWarning, match="mixer 'attention' of a-third-party"):
        assert discovery.find("attention") is Attention
