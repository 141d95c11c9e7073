"""The conformance kit: does a token mixer keep the contract of ``seqarch.mixer``?"""

from seqarch.testing.compare import ContractError
from seqarch.testing.kit import CHECKS, Check, check_mixer
from seqarch.testing.parametrize import parametrize_with_mixer_checks
from seqarch.testing.report import Report, Row
from seqarch.testing.subject import Subject

__all__ = [
    "CHECKS",
    "Check",
    "ContractError",
    "Report",
    "Row",
    "Subject",
    "check_mixer",
    "parametrize_with_mixer_checks",
]
