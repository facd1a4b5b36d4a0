"""An experiment's result file, its page and its figure, which always show the same numbers.

An experiment is a module of this folder:

    MINUTES              of the full form, on two cores
    measure(quick, jobs) -> dict    the runs and measurements: what <name>.json holds
    verdict(result) -> (word, why)  agrees, disagrees or undecided, by the criterion of the page
    table(result) -> str            Markdown
    draw(result) -> Figure

<name>.md is prose around one part that `write` fills from the result file:

    # Title
    `python -m experiments <name>`  The command, with its interpreter if it needs another one.
    **Hypothesis.** Its first sentence is the claim and who makes it: the README's gallery has it.
    **Criterion.** Stated before the runs; verdict() is nothing but this.
    <!-- result -->  verdict, table, figure  <!-- end of result -->  (either alone on its line)
    **Finding.** Its first sentence is the finding in plain words, also where it is another's.

The figure carries the digest of the result file, so that a test can tell whether the three belong
together (`check`). What else is said of an experiment anywhere is made of these files.
"""

import hashlib
import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
PART = re.compile(r"(?<=<!-- result -->\n).*(?=<!-- end of result -->)", re.DOTALL)
GALLERY = re.compile(r"(?<=<!-- gallery -->\n).*(?=<!-- end of gallery -->)", re.DOTALL)
VERDICTS = ("agrees", "disagrees", "undecided")
# In the order of a reader.
EXPERIMENTS: tuple[str, ...] = (
    "rank",
    "learning_rate",
    "layers",
    "capacity",
    "update",
    "mismatch",
    "corrections",
    "reference",
    "shipped",
    "many_adapters",
    "fleet",
    "cost",
)


class CannotRun(Exception):
    """What measure() raises where this environment lacks what an experiment is about."""


def load(name: str) -> ModuleType:
    return importlib.import_module(f"experiments.{name}")


def committed(name: str) -> dict | None:
    """The committed result file; None for an experiment that was not run yet."""
    file = HERE / f"{name}.json"
    return json.loads(file.read_text()) if file.is_file() else None


def digest_of(result_file: Path) -> str:
    return hashlib.sha256(result_file.read_bytes()).hexdigest()


def digest_in(figure: Path) -> str:
    """The digest that `write` put into a PNG: its text chunk "Source"."""
    found = re.search(rb"tEXtSource\0([0-9a-f]{64})", figure.read_bytes())
    return found[1].decode() if found else ""


def result_part(module: ModuleType, result: dict, name: str) -> str:
    """Verdict, table and figure, as they stand in the page."""
    word, why = module.verdict(result)
    assert word in VERDICTS, word
    heading = f"**Verdict: {word}.** {why}"
    return f"{heading}\n\n{module.table(result)}\n\n![{name}]({name}.png)\n"


def write(name: str, result: dict, folder: Path = HERE) -> None:
    """<name>.json and .png into `folder`, and the page with the result's part filled in."""
    module, file = load(name), folder / f"{name}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    result = json.loads(file.read_text())  # as a reader of the file has it: keys are strings
    figure = module.draw(result)
    figure.savefig(folder / f"{name}.png", dpi=120, metadata={"Source": digest_of(file)})
    pyplot.close(figure)
    text = (HERE / f"{name}.md").read_text()
    if not PART.search(text):
        raise ValueError(
            f"{HERE / name}.md: has no lines <!-- result --> and <!-- end of result -->"
        )
    part = result_part(module, result, name)
    (folder / f"{name}.md").write_text(PART.sub(lambda _: part, text))


def check(name: str) -> None:
    """ValueError if the committed result file, page and figure of an experiment differ."""
    file, page, figure = (HERE / f"{name}.{ending}" for ending in ("json", "md", "png"))
    found = PART.search(page.read_text())
    if not found or found[0] != result_part(load(name), committed(name), name):
        raise ValueError(
            f"{page}: is not what {file.name} says: python -m experiments {name} --draw"
        )
    if digest_in(figure) != digest_of(file):
        raise ValueError(
            f"{figure}: not drawn from {file.name}: python -m experiments {name} --draw"
        )


# --- what the list and the README say of an experiment --------------------------------------------


def first_sentence(name: str, heading: str) -> str:
    """Of a page's paragraph **Hypothesis.** or **Finding.**, on one line. ValueError if the page
    has no such paragraph."""
    page = HERE / f"{name}.md"
    found = re.search(rf"\*\*{heading}[^*]*\*\*(.*?)(?:\n\n|\Z)", page.read_text(), re.DOTALL)
    if not found or not found[1].strip():
        raise ValueError(f"{page}: has no paragraph that begins with **{heading}.**")
    text = " ".join(found[1].split())
    # A stop ends a sentence if something that may begin one follows: not "et al. 2021", "e.g. so".
    return re.split(r"(?<=[.!?])\s(?=[A-Z`*\[])", text)[0]


def title(name: str) -> str:
    return re.search(r"^# (.+)$", (HERE / f"{name}.md").read_text(), re.MULTILINE)[1]


def command(name: str) -> str:
    """What makes the page again, as it says itself. ValueError if it does not."""
    page = HERE / f"{name}.md"
    found = re.search(rf"`([^`\n]*python -m experiments {name})`", page.read_text())
    if not found:
        raise ValueError(f"{page}: has no `python -m experiments {name}`")
    return found[1]


def outcome(name: str) -> tuple[str, str]:
    """(verdict, finding) by the committed result."""
    result = committed(name)
    if result is None:
        return "not run", ""
    return load(name).verdict(result)[0], first_sentence(name, "Finding")


def gallery() -> str:
    """The README's: a row an experiment, and the figures, two a row, each above its command."""
    rows = ["| `python -m experiments ...` | minutes | claim | verdict | finding |"]
    rows += ["|---|---|---|---|---|"]
    for name in EXPERIMENTS:
        word, finding = outcome(name)
        claim, minutes = first_sentence(name, "Hypothesis"), load(name).MINUTES
        cells = [f"[`{name}`](experiments/{name}.md)", f"{minutes}", claim, f"**{word}**", finding]
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    drawn = [name for name in EXPERIMENTS if committed(name)]
    for pair in (drawn[first : first + 2] for first in range(0, len(drawn), 2)):
        rows += ["", f"| {' | '.join(map(title, pair))} |", "|---" * len(pair) + "|"]
        images = [f"[![{n}](experiments/{n}.png)](experiments/{n}.md)" for n in pair]
        rows += [f"| {' | '.join(images)} |"]
        rows += [f"| {' | '.join(f'`{command(name)}`' for name in pair)} |"]
    return "\n".join(rows) + "\n"


def write_gallery() -> None:
    README.write_text(GALLERY.sub(lambda _: gallery(), README.read_text()))
