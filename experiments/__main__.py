"""The gallery of experiments: what each claims, found, and takes.

python -m experiments                    list them
python -m experiments rank               run one: result file, figure and page again
python -m experiments rank --quick       a minute or two: the same code on less; nothing committed
python -m experiments all                the whole gallery, under two hours on two cores, and the
                                         README's table of it; without vLLM, mismatch stays as
                                         it is
python -m experiments rank --draw        page and figure again, from the committed result file
python -m experiments cost --price core=0.05 --price l40s=1.2
                                         at these dollars an hour; with --draw without new runs;
                                         nothing committed
python -m experiments --gallery          the README's gallery again, from the committed result files
"""

import argparse
import os
import signal
import sys
import time

from experiments import page
from experiments.runs import RUNS


def list_them() -> None:
    for name in page.EXPERIMENTS:
        verdict, finding = page.outcome(name)
        print(f"{name:15} {page.load(name).MINUTES:3d} min  {verdict:10} {finding}")


def carry_out(name: str, options: argparse.Namespace) -> None:
    """Runs (or with --draw reads) one, writes its files, prints what it found."""
    module, begun = page.load(name), time.monotonic()
    folder = RUNS / "quick" if options.quick else RUNS / "priced" if options.price else page.HERE
    folder.mkdir(parents=True, exist_ok=True)
    if options.draw:
        result = page.committed(name)
        if result is None:
            return print(f"{name} was not run: python -m experiments {name}")
    else:
        result = module.measure(options.quick, options.jobs)
    if options.price:
        result["prices"] |= options.price
    page.write(name, result, folder)
    word, why = module.verdict(result)
    less = " (of a quick run, which is less than the criterion asks for)" if options.quick else ""
    print(f"{name}: {word}{less}. {why}\n\n{module.table(result)}\n")
    print(f"{os.path.relpath(folder / name)}.md, .json, .png; {time.monotonic() - begun:.0f} s")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", choices=[*page.EXPERIMENTS, "all"])
    parser.add_argument("--quick", action="store_true", help="less of it, kept under runs/")
    parser.add_argument("--draw", action="store_true", help="from the committed result file")
    parser.add_argument("--gallery", action="store_true", help="write the README's gallery")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, a thread each")
    parser.add_argument(
        "--price", action="append", default=[], metavar="DEVICE=DOLLARS", help="an hour's, for cost"
    )
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: one run at a time is the least")
    if options.price and options.name != "cost":
        parser.error("--price is for the experiment cost alone")
    if options.price:
        try:
            options.price = page.load("cost").read_prices(options.price)
        except ValueError as error:
            parser.error(str(error))
    if options.quick and options.draw:
        parser.error("--draw draws what is committed, and --quick commits nothing")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no run is left behind
    if options.name:
        for name in page.EXPERIMENTS if options.name == "all" else [options.name]:
            try:
                carry_out(name, options)
            except page.CannotRun as why:
                if options.name != "all":
                    sys.exit(f"{name}: {why}")
                print(f"{name}: left as it is. {why}")
    if options.gallery or options.name == "all" and not options.quick:
        page.write_gallery()
    elif not options.name:
        list_them()


if __name__ == "__main__":
    main()
