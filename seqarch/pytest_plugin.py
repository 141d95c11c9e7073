"""What pytest loads where seqarch is installed: the mark of slow checks, and the mixers to check by name.

::

    pytest --pyargs seqarch.testing.contract --seqarch-mixer 'Mamba2(n_heads=4)'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--seqarch-mixer``, which may be given several times."""
    parser.getgroup("seqarch").addoption(
        "--seqarch-mixer",
        action="append",
        default=[],
        metavar="MIXER",
        help="Name or 'Name(option=value, ...)' of an installed mixer that seqarch.testing.contract checks.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known that the check which compiles has."""
    config.addinivalue_line("markers", "slow: takes long; `pytest -m 'not slow'` leaves it out")
