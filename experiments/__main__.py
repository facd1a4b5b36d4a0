"""The gallery of experiments: what each claims, found, and takes.

python -m experiments                    list them
python -m experiments rank               run one: result file, figure and page again
python -m experiments rank --quick       a minute or two: the same code on less; nothing committed
python -m experiments all                the whole gallery, under two hours on two cores
python -m experiments rank --draw        page and figure again, from the committed result file
"""

import argparse
import json
import time

from experiments import page
from experiments.runs import RUNS


def list_them() -> None:
    for name in page.EXPERIMENTS:
        result = json.loads((page.HERE / f"{name}.json").read_text())
        module = page.load(name)
        word, minutes = module.verdict(result)[0], module.MINUTES
        print(f"{name:15} {minutes:3d} min  {word:10} {page.finding(name)}")


def main() -> None:
    parser = argparse.ArgumentParser("python -m experiments", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=[*page.EXPERIMENTS, "all"])
    parser.add_argument("--quick", action="store_true", help="less of it, kept under runs/")
    parser.add_argument("--draw", action="store_true", help="from the committed result file")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, a thread each")
    options = parser.parse_args()
    if options.name is None:
        return list_them()
    folder = RUNS / "quick" if options.quick else page.HERE
    folder.mkdir(parents=True, exist_ok=True)
    for name in page.EXPERIMENTS if options.name == "all" else [options.name]:
        module, begun = page.load(name), time.monotonic()
        if options.draw:
            result = json.loads((page.HERE / f"{name}.json").read_text())
        else:
            result = module.measure(options.quick, options.jobs)
        page.write(name, result, folder)
        word, why = module.verdict(result)
        seconds = time.monotonic() - begun
        print(f"{name}: {word}. {why}\n{module.table(result)}\n{folder / name}.md, {seconds:.0f} s")


if __name__ == "__main__":
    main()
