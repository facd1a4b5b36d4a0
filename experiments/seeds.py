"""What several seeds say together: an interval, and whether a criterion holds, fails or stays open.

    0.91, 0.94, 0.89  ──► 0.913 ± 0.062       mean and half of its 95% interval, Student's t
    the whole interval on one side of a bound ──► True or False; the bound inside it ──► None

A page's verdict follows from its criteria: one that fails makes it "disagrees", one that is open
"undecided". Three seeds make wide intervals; that is what three seeds know.
"""

import math
from statistics import mean, stdev

# Two-sided 95% quantiles of Student's t, by the number of seeds.
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}


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


def above(values: list[float], bound: float) -> bool | None:
    """Whether the mean is above the bound; None where the interval does not tell."""
    middle, half = interval(values)
    if abs(middle - bound) < half:
        return None
    return middle >= bound


def decide(criteria: dict[str, bool | None]) -> tuple[str, str]:
    """Verdict and reason, of criteria in words."""
    words, why = {False: "Fails", None: "Open", True: "Holds"}, []
    for state, word in words.items():
        found = [criterion for criterion, its in criteria.items() if its is state]
        why += [f"{word}: {'; '.join(found)}."] if found else []
    states = set(criteria.values())
    word = "disagrees" if False in states else "undecided" if None in states else "agrees"
    return word, " ".join(why)
