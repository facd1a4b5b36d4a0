"""The gallery of experiments: that figure, table and result file agree, and how runs are kept."""

import json
import os
import subprocess
import sys

import pytest

from experiments import __main__ as command
from experiments import mismatch, page, runs

ROOT = page.HERE.parent
COMMITTED = [name for name in page.EXPERIMENTS if page.committed(name)]
WITH_VLLM = ("mismatch",)  # they compare with the real one
DEMONSTRATIONS = ("fleet",)  # agree however little is measured

# --- what is committed ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMITTED)
def test_figure_table_and_result_file_agree(name):
    page.check(name)


@pytest.mark.parametrize("name", page.EXPERIMENTS)
def test_a_page_states_claim_criterion_and_finding(name):
    for heading in ("Hypothesis", "Criteri", "Finding"):
        assert len(page.first_sentence(name, heading)) > 20
    assert page.load(name).__doc__ and page.load(name).MINUTES > 0
    python = ".venv-vllm/bin/python" if name in WITH_VLLM else "python"
    assert page.command(name) == f"{python} -m experiments {name}"


def test_the_gallery_in_the_readme_is_that_of_the_result_files():
    found = page.GALLERY.search(page.README.read_text())
    assert found and found[0] == page.gallery(), "python -m experiments --gallery"
    for name in COMMITTED:
        assert f"![{name}](experiments/{name}.png)" in found[0]
        assert f"| `{page.command(name)}` |" in found[0]


def test_the_whole_gallery_takes_less_than_two_hours():
    assert sum(page.load(name).MINUTES for name in page.EXPERIMENTS) < 120


def test_every_experiment_of_the_folder_is_in_the_gallery():
    texts = {path.stem: path.read_text() for path in page.HERE.glob("*.py")}
    assert {name for name, text in texts.items() if "\nMINUTES = " in text} == set(page.EXPERIMENTS)


# --- pages ----------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A folder with one experiment, `small`, that was run."""
    module = tmp_path / "small.py"
    module.write_text(
        "from matplotlib.figure import Figure\n"
        "MINUTES = 1\n"
        "def verdict(result): return 'undecided', f'{result[\"rows\"][\"1\"]} is one seed.'\n"
        'def table(result): return f\'| {result["rows"]["1"]} |\\n|---|\'\n'
        "def draw(result):\n"
        "    figure = Figure()\n"
        "    figure.subplots().plot([result['rows']['1'], 2])\n"
        "    return figure\n"
    )
    (tmp_path / "small.md").write_text(
        "# Small is | beautiful\n\n`.venv/bin/python -m experiments small`, or another python\n\n"
        "**Hypothesis.** Hu et al. 2021 say e.g. so. More.\n\n"
        "**Criterion.** One.\n\n<!-- result -->\n<!-- end of result -->\n\n"
        "**Finding.** It is\n3.5 times so. `More`.\n"
    )
    monkeypatch.setattr(page, "HERE", tmp_path)
    monkeypatch.setattr(page, "EXPERIMENTS", ("small",))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(page, "load", lambda name: __import__(name))
    yield tmp_path
    sys.modules.pop("small", None)


def test_a_page_is_filled_from_the_result_file(small):
    page.write("small", {"rows": {1: 0.25}}, small)  # keys as a reader of the file has them
    text = (small / "small.md").read_text()
    assert "**Verdict: undecided.** 0.25 is one seed.\n\n| 0.25 |\n|---|\n\n![small]" in text
    assert text.startswith("# Small") and text.endswith("`More`.\n")
    page.check("small")


@pytest.mark.parametrize("harm", ["result", "page", "figure", "none"])
def test_what_was_changed_by_hand_is_found(small, harm):
    page.write("small", {"rows": {1: 0.25}}, small)
    if harm == "result":
        (small / "small.json").write_text(json.dumps({"rows": {"1": 0.5}}))
    elif harm == "page":
        text = (small / "small.md").read_text()
        (small / "small.md").write_text(text.replace("| 0.25 |", "| 0.26 |"))
    elif harm == "figure":
        before = (small / "small.png").read_bytes()
        page.write("small", {"rows": {1: 0.5}}, small)
        (small / "small.png").write_bytes(before)
    else:
        return page.check("small")
    with pytest.raises(ValueError, match=f"small.{'png' if harm == 'figure' else 'md'}.*--draw"):
        page.check("small")


def test_the_gallery_has_claim_verdict_finding_figure_and_command(small):
    row = page.gallery().splitlines()[2]
    assert row == (
        "| [`small`](experiments/small.md) | 1 | Hu et al. 2021 say e.g. so. | **not run** |  |"
    )
    assert "png" not in page.gallery()
    page.write("small", {"rows": {1: 0.25}}, small)
    rows = page.gallery().splitlines()
    assert rows[2].endswith("| **undecided** | It is 3.5 times so. |")
    assert rows[-2:] == [
        "| [![small](experiments/small.png)](experiments/small.md) |",
        "| `.venv/bin/python -m experiments small` |",
    ]


def test_a_page_without_a_finding_is_refused(small):
    (small / "small.md").write_text("# Small\n\n**Hypothesis.** So.\n\n**Finding.**\n")
    with pytest.raises(ValueError, match="Finding"):
        page.first_sentence("small", "Finding")
    with pytest.raises(ValueError, match="<!-- result -->"):
        page.write("small", {"rows": {1: 0.25}}, small)
    with pytest.raises(ValueError, match="python -m experiments small"):
        page.command("small")


# --- runs -----------------------------------------------------------------------------------------

# Stands for train.py: says what it is told, and counts how often it was started.
PROGRAM = """
import json, pathlib, sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
output, ends = pathlib.Path(arguments["--output"]), arguments["--ends"]
assert not output.exists(), "train.py refuses a directory with something in it"
with open(pathlib.Path(__file__).parent / "started", "a") as file:
    file.write(ends + "\\n")
output.mkdir()
summary = {"eval_after": 0.75 if ends == "well" else None}  # a run that fails leaves one, too
(output / "summary.json").write_text(json.dumps(summary))
if ends == "late":
    (output / "metrics.jsonl").write_text('{"step": 1}\\n')
if ends == "well":
    (output / "metrics.jsonl").write_text('{"step": 1}\\n{"step": 2}\\n')
    sys.exit()
sys.exit({
    "early": "train.py: the gradient of A is not finite; version 0 is kept; try a lower --lr",
    "late": "train.py: B holds NaN or infinity, so the adapter is not written",
    "broken": "train.py: no such file",
}[ends])
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(runs, "RUNS", tmp_path / "runs")
    return tmp_path


def started(program) -> list[str]:
    return (program / "started").read_text().split()


def test_runs_come_in_order_and_are_kept(program):
    well, early = ("program.py", "--ends", "well"), ("program.py", "--ends", "early")
    first = runs.run_all([well, early, well], jobs=2)
    assert [run.held_out for run in first] == [0.75, 0.0, 0.75]
    assert [len(run.rows) for run in first] == [2, 0, 2] and first[0].cpu_seconds > 0
    assert runs.run_all([early, well], jobs=1) == [first[1], first[0]]
    assert sorted(started(program)) == ["early", "well"]


def test_a_number_that_is_not_finite_is_a_result(program):
    for ends in ("early", "late"):
        (run,) = runs.run_all([("program.py", "--ends", ends)])
        assert run.summary == {} and run.held_out == 0.0 and run.error.startswith("train.py: ")
        assert len(run.rows) == (ends == "late")


def test_a_broken_run_is_an_error_that_names_its_log_and_is_repeated(program):
    broken = ("program.py", "--ends", "broken")
    for times in (1, 2):
        with pytest.raises(RuntimeError, match=r"run\.log.*no such file"):
            runs.run_all([broken])
        assert started(program) == ["broken"] * times


def test_a_run_that_was_broken_off_is_repeated(program):
    well = ("program.py", "--ends", "well")
    (run,) = runs.run_all([well])
    (run.output.parent / "ended.json").unlink()  # all but the last word of it is there
    assert runs.run_all([well])[0].rows == run.rows and started(program) == ["well"] * 2


def test_fresh_runs_are_never_read(program):
    """Their seconds would be those of older code."""
    well = ("program.py", "--ends", "well")
    runs.run_all([well])
    runs.run_all([well, well], fresh=True)
    assert started(program) == ["well"] * 2
    with pytest.raises(ValueError, match="0 jobs"):
        runs.run_all([well], jobs=0)


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["rank", "--jobs", "0"], "--jobs 0"),
        (["rank", "--price", "core=1"], "for the experiment cost alone"),
        (["cost", "--price", "tpu=1"], "none of core, l40s"),
    ],
)
def test_what_cannot_be_is_refused(arguments, why, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2 and why in capsys.readouterr().err


@pytest.fixture
def no_handler(monkeypatch):
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)


def test_without_a_name_all_are_listed_with_minutes_and_verdict(no_handler, capsys):
    command.main([])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == list(page.EXPERIMENTS)
    for name, minutes, unit, *words in lines:
        verdict, finding = page.outcome(name)
        assert (int(minutes), unit) == (page.load(name).MINUTES, "min")
        assert " ".join(words) == f"{verdict} {finding}".strip()


def test_other_prices_change_nothing_committed(no_handler, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "RUNS", tmp_path)
    before = (page.HERE / "cost.json").read_bytes()
    command.main(["cost", "--draw", "--price", "l40s=2.5"])
    assert "l40s 2.50" in capsys.readouterr().out
    assert (page.HERE / "cost.json").read_bytes() == before
    assert json.loads((tmp_path / "priced" / "cost.json").read_text())["prices"]["l40s"] == 2.5


def test_mismatch_without_vllm_is_refused_by_name_of_the_environment(monkeypatch, small):
    monkeypatch.setattr(mismatch, "find_spec", lambda name: None)
    with pytest.raises(page.CannotRun, match=r"\.venv-vllm/bin/python -m experiments mismatch"):
        mismatch.measure(False, 1)


def test_all_writes_the_gallery_and_passes_over_what_cannot_run(
    no_handler, small, monkeypatch, capsys
):
    def refuse(quick, jobs):
        raise page.CannotRun("it needs another environment")

    (small / "README.md").write_text("<!-- gallery -->\nold\n<!-- end of gallery -->\n")
    monkeypatch.setattr(page, "README", small / "README.md")
    monkeypatch.setattr(page.load("small"), "measure", refuse, raising=False)
    command.main(["all"])
    assert "left as it is" in capsys.readouterr().out and not (small / "small.json").exists()
    monkeypatch.setattr(page.load("small"), "measure", lambda quick, jobs: {"rows": {"1": 0.25}})
    command.main(["all"])
    assert "| **undecided** | It is 3.5 times so. |" in (small / "README.md").read_text()


# --- the real thing, smaller ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept_runs(tmp_path_factory):
    """Experiments share runs, as they do for a user."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.vllm if name in WITH_VLLM else pytest.mark.slow)
        for name in page.EXPERIMENTS
    ],
)
def test_an_experiment_runs_in_its_quick_form(name, kept_runs):
    command = [sys.executable, "-m", "experiments", name, "--quick"]
    environment = os.environ | {"EXPERIMENT_RUNS": str(kept_runs)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = kept_runs / "quick"
    result = json.loads((folder / f"{name}.json").read_text())
    part = page.PART.search((folder / f"{name}.md").read_text())[0]
    assert part == page.result_part(page.load(name), result, name)
    assert page.digest_in(folder / f"{name}.png") == page.digest_of(folder / f"{name}.json")
    if name in DEMONSTRATIONS:
        assert page.load(name).verdict(result)[0] == "agrees", done.stdout
