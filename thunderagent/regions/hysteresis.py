"""Hysteresis: what is up stays up until it failed several times in a row, and is up again only after more successes.

One failure is noise and one success is luck: a judgement that followed each would move a region to and fro.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from thunderagent.model.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Hysteresis:
    """A judgement, and how many attempts in a row speak for or against it. Each attempt gives a new value.

    At first nothing is known: `is_up` is None, which is not up. `first` results of one kind in a row decide it. From
    then on it takes `down` failures in a row to fall, and `up` successes in a row to rise again.

    >>> one = Hysteresis().after(True)
    >>> one.is_up, one.after(True).is_up, one.after(False).is_up
    (None, True, None)

    Raises:
        ConfigurationError: a number is under 1.
    """

    down: int = 2
    """Failures in a row after which what is up is down."""
    up: int = 5
    """Successes in a row after which what is down is up."""
    first: int = 2
    """Results of one kind in a row that decide while nothing is known."""
    is_up: bool | None = None
    successes: int = 0
    failures: int = 0

    def __post_init__(self) -> None:
        numbers = {"down": self.down, "up": self.up, "first": self.first}
        problems = [f"{name} is {number!r}" for name, number in numbers.items() if number < 1]
        if problems:
            raise ConfigurationError(f"{', '.join(problems)}; hysteresis counts attempts in a row, so use 1 or more")

    def after(self, ok: bool | None) -> Hysteresis:
        """The judgement after one more attempt; None changes nothing."""
        if ok is None:
            return self
        successes, failures = (self.successes + 1, 0) if ok else (0, self.failures + 1)
        is_up = self.is_up
        if ok and successes >= (self.first if is_up is None else self.up):
            is_up = True
        elif not ok and failures >= (self.first if is_up is None else self.down):
            is_up = False
        return replace(self, is_up=is_up, successes=successes, failures=failures)

    @property
    def is_fine(self) -> bool:
        """Whether the last attempt did not fail and the judgement is not down. A metric with this value, whose alarm
        waits for `down` bad values in a row, shows a first failure at once and a return only after `up`
        successes."""
        return not self.failures and self.is_up is not False
