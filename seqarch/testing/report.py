"""What a run of the conformance kit found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["passed", "failed", "expected failure", "unexpected pass", "skipped"]


@dataclass(frozen=True)
class Row:
    """The result of one check.

    Attributes:
        check: Name of the check.
        status: How it ended.
        seconds: Wall time.
        message: What is broken, or why the check was skipped or may fail.
    """

    check: str
    status: Status
    seconds: float
    message: str = ""


@dataclass(frozen=True)
class Report:
    """The results of all checks on one mixer.

    Attributes:
        mixer: What was checked.
        rows: One for each check.
    """

    mixer: str
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Nothing failed unexpectedly, and nothing passed that was expected to fail."""
        return not any(row.status in ("failed", "unexpected pass") for row in self.rows)

    def failed(self) -> list[str]:
        """Names of the checks that failed unexpectedly."""
        return [row.check for row in self.rows if row.status == "failed"]

    def to_dict(self) -> dict[str, Any]:
        """The report in types that JSON knows."""
        return {"mixer": self.mixer, "ok": self.ok, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        width = max((len(row.check) for row in self.rows), default=0)
        lines = [f"{self.mixer}: {'conforms' if self.ok else 'does not conform'}"]
        for row in self.rows:
            lines.append(f"  {row.check:<{width}}  {row.status:<16}  {row.seconds:6.2f} s  {row.message}".rstrip())
        return "\n".join(lines)
