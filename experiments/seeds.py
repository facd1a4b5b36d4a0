"""What several seeds say together: an interval, and whether a criterion holds, fails or stays open.

    0.91, 0.94, 0.89  ──► 0.913 ± 0.062       mean and half of its 95% interval, Student's t
    the whole interval on one side of a bound ──► True or False; the bound in or at it ──► None

A page's verdict follows from its criteria: one that fails makes it "disagrees", one that is open
"undecided". Three seeds make wide intervals; that is what three seeds know.
"""

import math
from statistics import mean, stdev

# Two-sided 95% quantiles of Student's t, by the number of seeds.
T95 = {
    **{2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571},
    **{7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262},
}
# Stands under tables.
NOTE = (
    "Intervals: 95% over seeds (Student's t), which all have the same held-out questions: they say "
    "nothing of other ones."
)


WORDS = {True: "agrees", False: "disagrees", None: "undecided"}


def interval(values: list[float]) -> tuple[float, float]:
    """Mean over the seeds and half of its 95% interval, infinite for a single one."""
    if len(values) < 2:
        return values[0], math.inf
    return mean(values), T95[len(values)] * stdev(values) / math.sqrt(len(values))


def told(values: list[float], form: str = ".3f") -> str:
    """The interval for a table, e.g. 0.953 ± 0.012."""
    middle, half = interval(values)
    width = f" ± {half:{form.lstrip('+')}}" if math.isfinite(half) else " (one seed)"
    return f"{middle:{form}}{width}"


def times(logs: list[float], form: str = ".1f") -> str:
    """The interval of a factor, or of another positive number, from its log10 in each seed, e.g.
    2.1 (1.7 to 2.5)."""
    middle, half = interval(logs)
    if math.isinf(half):
        return f"{10**middle:{form}} (one seed)"
    low, high = (10**edge for edge in (middle - half, middle + half))
    return f"{10**middle:{form}} ({low:{form}} to {high:{form}})"


def above(values: list[float], bound: float) -> bool | None:
    """Whether the mean is above the bound; None where the interval holds or touches it."""
    middle, half = interval(values)
    if abs(middle - bound) <= half:
        return None
    return middle > bound


def every(states: list[bool | None]) -> bool | None:
    """Whether all hold: False if one fails, else None if one is open."""
    return False if False in states else None if None in states else True


def within(values: list[float], low: float = -math.inf, high: float = math.inf) -> bool | None:
    """Whether the mean lies between low and high."""
    over = above(values, high)
    return every([above(values, low), None if over is None else not over])


def decide(criteria: dict[str, bool | None]) -> tuple[str, str]:
    """Verdict and reason, of criteria in words."""
    words, why = {False: "Fails", None: "Open", True: "Holds"}, []
    for state, word in words.items():
        found = [criterion for criterion, its in criteria.items() if its is state]
        why += [f"{word}: {'; '.join(found)}."] if found else []
    return WORDS[every(list(criteria.values()))], " ".join(why)
