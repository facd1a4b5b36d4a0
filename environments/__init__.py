"""What an agent acts in: an environment sees messages and returns messages and a reward.

    prompt(task)             the messages that an episode starts with
    tools                    plain Python functions that the model may call
    reward(task, messages)   what the whole conversation was worth; awaited if it has to wait
    train, eval              its tasks; those of eval are held out

No tokens, no tensors: rollout.py renders, samples and parses. Here is what environments share:
reading tasks, the schema of a tool, calling it. The model's mistakes go back to the model, as
"error: ..."; the user's raise, with file and line.
"""

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from huggingface_hub import snapshot_download

ENVIRONMENTS = {"wiki_search": "WikiSearch", "math_qa": "MathQA"}  # module -> its class
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
Source = str | Path  # a .jsonl or .parquet file, or a dataset of the Hub: "owner/name"


@dataclass(frozen=True)
class Task:
    id: str
    question: str
    answer: str  # for the reward alone: no prompt contains it


def load_environment(name: str, **options):
    """The environment of a module, made with its own options; ValueError for an unknown name."""
    if name not in ENVIRONMENTS:
        raise ValueError(f"unknown environment {name!r}; known: {', '.join(sorted(ENVIRONMENTS))}")
    return getattr(import_module(f"environments.{name}"), ENVIRONMENTS[name])(**options)


def final_reply(messages: list[dict]) -> str:
    """The text of the last assistant message, or "" if that one still calls a tool."""
    turns = [message for message in messages if message["role"] == "assistant"]
    return "" if not turns or turns[-1].get("tool_calls") else turns[-1].get("content") or ""


# --- tools ---------------------------------------------------------------------------------------


@cache  # an agent's every call is checked against it
def tool_schema(tool: Callable) -> dict:
    """Its JSON schema as OpenAI and Qwen write it, from its signature, first line and "Args:"."""
    doc = inspect.getdoc(tool) or ""
    described = dict(re.findall(r"^\s+(\w+): (.+)$", doc.partition("Args:")[2], re.MULTILINE))
    hints, properties, required = get_type_hints(tool), {}, []
    for name, parameter in inspect.signature(tool).parameters.items():
        if hints.get(name) not in JSON_TYPES:
            raise TypeError(f"{tool.__name__}: annotate {name} with str, int, float or bool")
        properties[name] = {"type": JSON_TYPES[hints[name]]}
        if name in described:
            properties[name]["description"] = described[name]
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": tool.__name__, "description": doc.partition("\n")[0]}
    return {"type": "function", "function": {**function, "parameters": parameters}}


def call_tool(tools: list[Callable], name: Any, arguments: Any) -> str:
    """What the model reads after its call: the tool's result, or "error: ..." and what was wrong.
    A tool refuses an argument with ValueError; any other exception is a bug and passes."""
    try:
        tool = next((tool for tool in tools if tool.__name__ == name), None)
        if tool is None:
            known = ", ".join(tool.__name__ for tool in tools) or "there are none"
            raise ValueError(f"unknown tool {name!r:.60}; tools: {known}")
        check_arguments(arguments, tool_schema(tool)["function"]["parameters"])
        result = tool(**arguments)
    except ValueError as error:
        result = f"error: {error}"
    return encodable(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False))


def check_arguments(arguments: Any, parameters: dict) -> None:
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments must be an object, not {type(arguments).__name__}")
    if missing := [name for name in parameters["required"] if name not in arguments]:
        raise ValueError(f"missing argument {', '.join(missing)}")
    for name, value in arguments.items():
        if name not in parameters["properties"]:
            known = ", ".join(parameters["properties"])
            raise ValueError(f"unknown argument {name!r:.60}; arguments: {known}")
        wanted, given = parameters["properties"][name]["type"], JSON_TYPES.get(type(value))
        if given != wanted and (given, wanted) != ("integer", "number"):
            raise ValueError(f"argument {name} must be of type {wanted}, not {value!r:.60}")


def encodable(text: str) -> str:
    """With "?" for each lone surrogate, which JSON can write and no tokenizer can read."""
    return text.encode("utf-8", "replace").decode()


# --- files ---------------------------------------------------------------------------------------


def load_tasks(questions: Source, eval_questions: Source | None) -> tuple[list[Task], list[Task]]:
    """Tasks to train on, and tasks held out: from their own file, or else the last quarter."""
    tasks = [Task(**row) for row in read_rows(questions, ("question", "answer"))]
    kept = len(tasks) - len(tasks) // 4
    if eval_questions is None:
        return tasks[:kept], tasks[kept:]
    return tasks, [Task(**row) for row in read_rows(eval_questions, ("question", "answer"))]


def read_rows(source: Source, columns: tuple, default_id: Callable | None = None) -> list[dict]:
    """The given columns of each row as text, and its "id": the column's, else default_id(row), else
    the row's index. ValueError names file and line."""
    rows = {}
    for number, line in enumerate(read_lines(source), start=1):
        if not line:
            continue
        try:
            row = text_row(json.loads(line) if isinstance(line, str) else line, columns)
            row.setdefault("id", default_id(row) if default_id else str(len(rows)))
            if row["id"] in rows:
                raise ValueError(f"an earlier line has the id {row['id']!r} too")
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: {error}") from None
        rows[row["id"]] = row
    if not rows:
        raise ValueError(f"{source} is empty: expected rows with columns {', '.join(columns)}")
    return list(rows.values())


def text_row(raw: Any, columns: tuple) -> dict[str, str]:
    """The row's columns as text; a "problem", as mathematics' datasets say, is a question."""
    if not isinstance(raw, dict):
        raise ValueError(f"expected an object, not {type(raw).__name__}")
    if "question" in columns and raw.get("question") is None and "problem" in raw:
        raw = raw | {"question": raw["problem"]}
    row = {name: raw[name] for name in (*columns, "id") if raw.get(name) is not None}
    if missing := [name for name in columns if name not in row]:
        raise ValueError(f"no {', '.join(missing)}; it has {', '.join(raw)}")
    for name, value in row.items():
        blank = not str(value).strip() and name != "content"  # a page may be empty
        if blank or isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"{name} must be text or a number, not {value!r:.60}")
        row[name] = encodable(str(value))
    return row


def read_lines(source: Source) -> list[str] | list[dict]:
    """The lines of a JSONL file, or the rows of a parquet file or of a dataset's split "train"."""
    path = Path(source)
    looks_so = re.fullmatch(r"[\w-]+/[\w.-]+(?<!\.jsonl)(?<!\.parquet)", str(source))
    on_hub = looks_so and not path.exists()
    try:
        if not on_hub and path.suffix != ".parquet":
            text = path.read_text(encoding="utf-8-sig")  # -sig: a byte order mark is no text
            return [line.strip() for line in text.split("\n")]
        from pyarrow.parquet import read_table

        files = [path]
        if on_hub:
            train = "*train*.parquet"  # of the whole path: data/train-0.parquet, train/0.parquet
            folder = snapshot_download(str(source), repo_type="dataset", allow_patterns=train)
            found = sorted(Path(folder).rglob("*.parquet"))
            files = [f for f in found if fnmatch(f.relative_to(folder).as_posix(), train)]
        return [row for file in files for row in read_table(file).to_pylist()]
    except ImportError:
        needs = "parquet needs pip install pyarrow (the extra [data])"
        raise ImportError(f"{source}: {needs}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{source} can't be read: line {line}: {error}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} can't be read: {error}") from None
