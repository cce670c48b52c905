"""What the report says: departure delays by carrier and by month."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CarrierDelay:
    """Departures of one carrier.

    Attributes:
        carrier: Its code.
        name: Its name in table airlines; None if it is not in there.
        sum: Minutes late at departure, over all flights with a known delay; early ones count as negative.
        count: Flights with a known delay.
        mean: sum / count; None if count is 0.
    """

    carrier: str | None
    name: str | None
    sum: int
    count: int
    mean: float | None


@dataclass(frozen=True)
class MonthDelay:
    """Departures of one month (1 to 12); the rest as in CarrierDelay."""

    month: int | None
    sum: int
    count: int
    mean: float | None


@dataclass(frozen=True)
class Report:
    """The report. `rows`: rows per table."""

    rows: dict[str, int]
    by_carrier: list[CarrierDelay]
    by_month: list[MonthDelay]
