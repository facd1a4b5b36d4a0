"""An experiment's result file, its page and its figure, which always show the same numbers.

An experiment is a module of this folder:

    MINUTES              of the full form, on two cores
    measure(quick, jobs) -> dict    the runs and measurements: what <name>.json holds
    verdict(result) -> (word, why)  agrees, disagrees or undecided, by the criterion of the page
    table(result) -> str            Markdown
    draw(result) -> Figure

<name>.md is prose (hypothesis, source, criterion, finding) around one part that `write` fills from
the result file. The figure carries the digest of that file, so that a test can tell whether the
three belong together (`check`).
"""

import hashlib
import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import matplotlib

matplotlib.use("Agg")

HERE = Path(__file__).resolve().parent
PART = re.compile(r"(?<=<!-- result -->\n).*(?=<!-- end of result -->)", re.DOTALL)
VERDICTS = ("agrees", "disagrees", "undecided")
# In the order of a reader.
EXPERIMENTS: tuple[str, ...] = ("rank", "learning_rate", "layers", "capacity")


def load(name: str) -> ModuleType:
    return importlib.import_module(f"experiments.{name}")


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
    """<name>.json and .png into `folder`, and the result's part of <name>.md."""
    module, file = load(name), folder / f"{name}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    figure = module.draw(result)
    figure.savefig(folder / f"{name}.png", dpi=120, metadata={"Source": digest_of(file)})
    part = result_part(module, json.loads(file.read_text()), name)
    text = (HERE / f"{name}.md").read_text()
    (folder / f"{name}.md").write_text(PART.sub(lambda _: part, text))


def check(name: str) -> None:
    """ValueError if the committed result file, page and figure of an experiment differ."""
    file, page, figure = (HERE / f"{name}.{ending}" for ending in ("json", "md", "png"))
    result = json.loads(file.read_text())
    found = PART.search(page.read_text())
    if not found or found[0] != result_part(load(name), result, name):
        raise ValueError(f"{page}: is not what {file.name} says: python -m experiments {name}")
    if digest_in(figure) != digest_of(file):
        raise ValueError(f"{figure}: was not drawn from {file.name}: python -m experiments {name}")


def finding(name: str) -> str:
    """The first sentence of the page's finding."""
    text = (HERE / f"{name}.md").read_text().partition("**Finding.**")[2]
    return " ".join(re.split(r"(?<=[.!?])\s", text.strip())[0].split())
