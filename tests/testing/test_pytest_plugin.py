"""Mixers checked by name, in a suite that knows nothing but seqarch's pytest plugin."""

import subprocess
import sys

import pytest


@pytest.fixture
def suite(tmp_path):
    """Run pytest there, with warnings as errors, and give its output."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers -W error -p no:cacheprovider\n")

    def run(*options):
        command = [sys.executable, "-m", "pytest", "-p", "seqarch.pytest_plugin", "-m", "not slow", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


def test_an_installed_mixer_is_checked_by_name(suite):
    status, out = suite(
        "--pyargs", "seqarch.testing.contract", "--seqarch-mixer", "Attention(n_heads=2)", "-k", "lengths or compile"
    )
    assert status == 0, out
    assert "1 passed" in out


def test_mistakes_are_errors(suite):
    for options, message in (
        ([], "say which mixers to check: --seqarch-mixer NAME"),
        (["--seqarch-mixer", "Attenton"], "no mixer is called 'Attenton': did you mean 'Attention'"),
    ):
        status, out = suite("--pyargs", "seqarch.testing.contract", *options)
        assert status != 0
        assert message in out
