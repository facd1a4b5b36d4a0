"""The house: who may not know whom, what the README names, what every file owes its reader.

Imports are read by ast, so a rule holds for code that no test runs, too.
"""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

from benchmarks import readme

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path for path in ROOT.glob("*.py")) + sorted((ROOT / "environments").glob("*.py"))
TOOLS = sorted((ROOT / "tools").glob("*.py"))
ENVIRONMENTS = sorted((ROOT / "environments").glob("*.py"))
OURS = {path.stem for path in FILES} - {"__init__"} | {"environments"}
BESIDE = {"tools", "experiments", "benchmarks", "tests", "tiny", "assets", "configs", "wiki"}
SOURCES = sorted(
    path
    for folder in ("", "environments", "assets", "tests", "tools", "experiments", "benchmarks")
    for path in (ROOT / folder).glob("*")
    if path.suffix in (".py", ".md", ".toml", ".txt", ".sh")
)


def parsed(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text())


def imports(tree: ast.AST, at_start: bool = False) -> set[str]:
    """First components of all imported modules; at_start: only of those imported with the file."""
    nodes = tree.body if at_start else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "an absolute import says where a name comes from"
            found.add(node.module.partition(".")[0])
    return found


def installed(names: set[str]) -> set[str]:
    """Without ours and the standard library's."""
    return names - OURS - set(sys.stdlib_module_names)


# --- who may not know whom ------------------------------------------------------------------------


def test_grpo_imports_torch_alone():
    assert imports(parsed("grpo.py")) - set(sys.stdlib_module_names) == {"torch"}


def test_the_model_knows_its_experts_and_checkpoints_alone():
    assert imports(parsed("model.py")) & OURS == {"checkpoint", "experts", "head", "packing"}
    for file in ("experts.py", "head.py", "packing.py"):
        assert imports(parsed(file)) - set(sys.stdlib_module_names) == {"torch"}


def test_lora_knows_no_model_but_for_its_command_line():
    tree = parsed("lora.py")
    assert imports(tree, at_start=True) & OURS == {"experts"}
    inside = {
        node.name: imports(node) & OURS for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    assert {name: found for name, found in inside.items() if found} == {"main": {"model"}}


@pytest.mark.parametrize(
    "file, forbidden",
    [
        (
            "broadcast.py",
            {
                "rollout",
                "engine",
                "config",
                "chat",
                "grpo",
                "train",
                "run",
                "model",
                "environments",
            },
        ),
        ("quant.py", OURS),
        ("engine.py", OURS - {"broadcast", "lora", "model", "segments"}),
        ("segments.py", OURS - {"lora"}),
        ("full.py", OURS - {"checkpoint", "experts", "lora"}),
        ("client.py", OURS - {"broadcast", "engine", "lora", "model"}),
        ("distributed.py", OURS - {"lora"}),
        ("pipeline.py", OURS),
        ("rollout.py", OURS - {"chat", "client", "engine"}),
        ("config.py", {"rollout", "engine", "chat", "train", "run", "model", "broadcast"}),
        ("run.py", {"rollout", "engine", "chat", "grpo", "train", "model", "environments"}),
    ],
)
def test_nobody_knows_more_than_it_needs(file, forbidden):
    assert not imports(parsed(file)) & forbidden


@pytest.mark.parametrize("file", ["client.py", "engine.py", "rollout.py"])
def test_the_sampler_knows_no_optimizer_and_no_loss(file):
    names = {node.id for node in ast.walk(parsed(file)) if isinstance(node, ast.Name)}
    names |= {n.attr for n in ast.walk(parsed(file)) if isinstance(n, ast.Attribute)}
    assert not names & {"optim", "optimizer", "backward", "grad", "loss", "advantages"}


def test_the_run_holds_no_mathematics():
    """train.py moves tensors about; what is computed of them stands in grpo.py and model.py."""
    attributes = {n.attr for n in ast.walk(parsed("train.py")) if isinstance(n, ast.Attribute)}
    assert not attributes & {"exp", "log", "softmax", "log_softmax", "logsumexp", "clamp", "matmul"}


@pytest.mark.parametrize("path", ENVIRONMENTS, ids=lambda path: path.name)
def test_an_environment_sees_messages_and_no_tokens(path):
    found = imports(parsed(path.relative_to(ROOT)))
    assert not found & (OURS - {"environments"})
    judge = {"aiohttp"} if path.name == "judge.py" else set()
    assert installed(found) <= {"huggingface_hub", "pyarrow"} | judge


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_core_imports_nothing_from_what_stands_beside_it(path):
    tree = parsed(path.relative_to(ROOT))
    beside = [
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("tools.")
    ]
    # The launcher, the planner and the rehearsal: inside the function that starts each, once.
    commands = ["tools.plan", "tools.rehearse", "tools.vllm_server"]
    allowed = {"tools"} if path.name == "train.py" and sorted(beside) == commands else set()
    assert not imports(tree) & BESIDE - allowed
    assert "tools" not in imports(tree, at_start=True)


def test_only_the_run_knows_the_run():
    knowing = {path.name for path in FILES if "train" in imports(parsed(path.relative_to(ROOT)))}
    assert knowing <= {"sft.py"}


def test_every_package_that_is_imported_is_required():
    required = (ROOT / "requirements.txt").read_text().lower()
    brought_along = {"huggingface_hub", "tqdm", "pyarrow", "matplotlib"}
    for path in FILES + TOOLS:
        for name in installed(imports(parsed(path.relative_to(ROOT))) - BESIDE) - brought_along:
            assert re.search(rf"^{name}\b", required, re.MULTILINE), f"{path.name}: {name}"


def test_what_is_imported_from_ours_exists():
    """Also by scripts that no test runs."""
    folders = ("", "environments", "assets", "tools", "experiments", "benchmarks", "tests")
    missing = []
    for path in (path for folder in folders for path in (ROOT / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.module not in OURS - {"environments"}:
                continue
            tree = parsed(f"{node.module}.py")
            offered = names_of(ROOT / f"{node.module}.py")
            offered |= {
                a.asname or a.name for n in tree.body if hasattr(n, "names") for a in n.names
            }
            offered |= {n.target.id for n in tree.body if isinstance(n, ast.AnnAssign)}
            offered |= {
                e.id
                for n in tree.body
                if isinstance(n, ast.Assign)
                for t in n.targets
                if isinstance(t, ast.Tuple)
                for e in t.elts
            }
            missing += [f"{path.name}: {a.name}" for a in node.names if a.name not in offered]
    assert missing == []


# --- the README -----------------------------------------------------------------------------------


@functools.cache
def names_of(file: Path) -> set[str]:
    """Functions, classes and constants of a Python file; methods as "method" and "Class.method"."""
    found = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in getattr(node, "body", []):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.update({child.name, prefix + child.name})
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign):
                found.update(t.id for t in child.targets if isinstance(t, ast.Name))

    visit(ast.parse(file.read_text()), "")
    return found


def rows_below(text: str, first: str, last: str) -> list[list[str]]:
    """The cells of every row of the tables whose header has three cells, such at its ends."""
    rows, inside = [], False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and (cells[0], cells[2]) == (first, last):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not set(line) <= set("|-: "):
            rows.append(cells)
    return rows


def idea_rows(text: str) -> list[list[str]]:
    """Of the tables with the header | idea | function | test |."""
    return rows_below(text, "idea", "test")


def bug_rows(text: str) -> list[list[str]]:
    """Of the tables with the header | report | what went wrong | here |."""
    return rows_below(text, "report", "here")


def table_problems(text: str, root: Path = ROOT) -> list[str]:
    """What a reader of the table would look for in vain."""
    problems = []
    for row in idea_rows(text):
        functions = re.findall(r"`([\w/]+\.py): ([\w.]+)`", row[1]) if len(row) == 3 else []
        tests = re.findall(r"`(tests/\w+\.py)::(\w+)`", row[2]) if len(row) == 3 else []
        if not functions or not tests:
            problems.append(f"not `file.py: function` and `tests/test_x.py::test_name`: {row}")
        for file, name in functions + tests:
            if not (root / file).is_file():
                problems.append(f"{file} does not exist")
            elif name not in names_of(root / file):
                problems.append(f"{file} has no {name}")
    return problems


def bug_problems(text: str, root: Path = ROOT) -> list[str]:
    """Rows of public bugs without a report's number, and without a test that exists or a reason."""
    problems = []
    for row in bug_rows(text):
        reports = row[0].split(", ")
        if len(row) != 3 or not all(re.fullmatch(r"[\w./-]+#\d+", report) for report in reports):
            problems.append(f"not repository#number, ... | what went wrong | here: {row}")
            continue
        tests = re.findall(r"`(tests/test_\w+\.py)::(test_\w+)`", row[2])
        if len(tests) != row[2].count("::"):
            problems.append(f"not `tests/test_x.py::test_name`: {row[2]}")
        if not re.sub(r"`[^`]*`", "", row[2]).strip(" ,;:") and not tests:
            problems.append(f"neither test nor reason: {row}")
        for file, name in tests:
            if not (root / file).is_file():
                problems.append(f"{file} does not exist")
            elif name not in names_of(root / file):
                problems.append(f"{file} has no {name}")
    return problems


def missing_files(text: str, root: Path = ROOT) -> list[str]:
    """Links, Python files, and paths into a folder of ours that lead nowhere.

    Other names in backquotes (metrics.jsonl, my.toml) are of what a run writes or a user brings.
    """
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    folders = [path.name for path in root.iterdir() if path.is_dir() and path.name[0] not in "._"]
    inside = re.findall(rf"(?<![\w/.-])((?:{'|'.join(map(re.escape, folders))})/[\w./-]*\w)", text)
    python = re.findall(r"(?<![\w/.-])([\w-]+(?:/[\w-]+)*\.py)\b", text)
    named = {path for path in (*links, *inside, *python) if not path.startswith("runs/")}
    # A file in the list of a folder's contents is named without its folder.
    nearby = {path.name for folder in folders for path in (root / folder).iterdir()}
    return sorted(
        path for path in named if not (root / path).exists() and ("/" in path or path not in nearby)
    )


def test_the_table_from_idea_to_test_names_what_exists():
    text = (ROOT / "README.md").read_text()
    assert table_problems(text) == []
    assert len(idea_rows(text)) >= 10


def test_the_table_of_public_bugs_names_tests_that_exist():
    text = (ROOT / "tests" / "README.md").read_text()
    assert bug_problems(text) == []
    assert len(bug_rows(text)) >= 90


def test_a_public_bug_without_test_or_reason_is_found():
    head = "| report | what went wrong | here |\n|---|---|---|\n"
    good = "| a#1, b/c-d#22 | wrong | `tests/test_house.py::test_every_source_is_finished` |\n"
    assert bug_problems(head + good) == [] and len(bug_rows(head + good)) == 1
    assert bug_problems(head + "| a#1 | wrong | it has no such part |\n") == []
    assert bug_problems(head + "| a#1 | wrong | |\n")
    assert bug_problems(head + good.replace("is_finished", "is_unfinished"))
    assert bug_problems(head + good.replace("test_house", "test_gone"))
    assert bug_problems(head + good.replace("`", ""))
    assert bug_problems(head + good.replace("#22", ""))
    assert bug_problems(head + good.replace("| wrong", ""))


@pytest.mark.parametrize("readme", ["README.md", "tests/README.md"])
def test_every_file_that_a_readme_names_exists(readme):
    assert missing_files((ROOT / readme).read_text()) == []


def test_the_readme_says_once_where_python_is():
    lines = (ROOT / "README.md").read_text().splitlines()
    named = [line for line in lines if re.search(r"(?<![\w-])\.venv/bin/", line)]
    said = [line for line in named if "pip install" not in line]  # which is before there is one
    assert len(said) == 1 and ". .venv/bin/activate" in said[0]


def test_the_table_of_files_has_every_file_of_the_core():
    rows = re.findall(r"^\| `([\w/.]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {path.name for path in ROOT.glob("*.py")} == {row for row in rows if row[-3:] == ".py"}


def test_the_tables_of_benchmarks_are_those_of_the_result_files():
    text = (ROOT / "README.md").read_text()
    assert text == readme.renewed(text), "python benchmarks/readme.py"


@pytest.mark.parametrize("part", readme.PARTS)
def test_a_part_without_its_result_file_stays_and_one_without_marks_is_refused(part, monkeypatch):
    text = (ROOT / "README.md").read_text()
    monkeypatch.setitem(readme.PARTS, part, lambda: ["of the files"])
    changed = readme.renewed(text)
    assert f"<!-- {part} -->\nof the files\n<!-- end of {part} -->" in changed
    monkeypatch.setitem(readme.PARTS, part, list)
    assert readme.renewed(changed) == changed
    with pytest.raises(ValueError, match=f"<!-- {part} -->"):
        readme.renewed(text.replace(f"<!-- {part} -->", ""))


def test_a_name_that_does_not_exist_is_found():
    head = "| idea | function | test |\n|---|---|---|\n"
    good = "| a | `grpo.py: policy_loss` | `tests/test_house.py::test_every_source_is_finished` |\n"
    assert table_problems(head + good) == [] and len(idea_rows(head + good)) == 1
    assert table_problems(head + good.replace("policy_loss", "rl_loss"))
    assert table_problems(head + good.replace("grpo.py", "gone.py"))
    assert table_problems(head + good.replace("is_finished", "is_unfinished"))
    assert table_problems(head + good.replace("`", ""))
    assert (
        table_problems(head + good.replace("grpo.py: policy_loss", "lora.py: LoRALinear.add")) == []
    )
    assert idea_rows("| file | its one idea |\n|---|---|\n| `grpo.py` | losses |\n") == []
    assert missing_files(
        "see [it](gone.md), `gone.py`, python assets/gone.py and tests/gone.toml"
    ) == [*("assets/gone.py", "gone.md", "gone.py", "tests/gone.toml")]
    assert missing_files("`train.py`, `wiki_search.py`, metrics.jsonl, https://a.b/c.py") == []


# --- what every file owes its reader --------------------------------------------------------------


def test_every_source_is_finished():
    marks = re.compile(
        r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b"
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if marks.search(line)
    ]
    assert found == []


def test_the_licence_is_there():
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()


def undocumented(tree: ast.Module) -> list[str]:
    """Public functions and classes without a docstring, unless their body is at most twelve lines.

    __init__ and forward are what their class's docstring says.
    """
    found = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in node.body:
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            lines = child.end_lineno - child.body[0].lineno + 1
            exempt = child.name.startswith("_") or (
                prefix and child.name in ("forward", "backward")
            )
            if lines > 12 and not exempt and not ast.get_docstring(child):
                found.append(prefix + child.name)
            if isinstance(child, ast.ClassDef):
                visit(child, f"{child.name}.")

    visit(tree, "")
    return found


@pytest.mark.parametrize("path", FILES + TOOLS, ids=lambda path: path.stem)
def test_what_is_public_and_not_tiny_says_what_it_does(path):
    tree = parsed(path.relative_to(ROOT))
    assert ast.get_docstring(tree), "a file begins with its one idea"
    assert undocumented(tree) == []


def test_an_undocumented_function_is_found():
    body = "\n".join(f"    x = {number}" for number in range(13))
    assert undocumented(ast.parse(f"def f():\n{body}")) == ["f"]
    assert undocumented(ast.parse(f'def f():\n    """What."""\n{body}')) == []
    assert undocumented(ast.parse(f"def _f():\n{body}")) == []


@pytest.mark.parametrize("path", FILES + TOOLS, ids=lambda path: path.stem)
def test_no_error_is_swallowed(path):
    """No bare except, and none that passes over everything."""
    for node in ast.walk(parsed(path.relative_to(ROOT))):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{path.name}:{node.lineno}: a bare except"
            broad = getattr(node.type, "id", "") in ("Exception", "BaseException")
            silent = all(isinstance(statement, ast.Pass | ast.Continue) for statement in node.body)
            assert not (broad and silent), f"{path.name}:{node.lineno}: a silent fallback"
