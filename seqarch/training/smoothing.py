"""The training loss, smoothed over steps."""

from __future__ import annotations

HORIZON = 50
"""Steps. The mean of a step's age in the average is about one less."""


class SmoothedLoss:
    """An exponential moving average of the loss of each step, corrected for its start (Kingma & Ba 2015, section 3).

    It lags: late in training it is the loss of the model of about ``HORIZON`` steps ago, and its noise is a tenth of a
    single step's. Unlike a mean between validations it does not depend on when these come.
    """

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0

    def add(self, loss: float) -> None:
        """Take in the loss of the next step."""
        self._sum += (loss - self._sum) / HORIZON
        self._weight += (1.0 - self._weight) / HORIZON

    @property
    def value(self) -> float | None:
        """The average; None before the first step."""
        return self._sum / self._weight if self._weight else None

    def state(self) -> list[float]:
        """What `load` needs to go on."""
        return [self._sum, self._weight]

    def load(self, state: list[float]) -> None:
        """Go on from a `state`."""
        self._sum, self._weight = state
