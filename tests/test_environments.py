"""The environments: whatever a model writes is answered, and only the right answer scores."""

import inspect
import json
import re
import sqlite3
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from huggingface_hub.utils import filter_repo_objects
from hypothesis import example, given
from hypothesis import strategies as st

from assets.make_math_qa import make
from environments import call_tool, load_environment, load_tasks, read_rows, tool_schema
from environments.math_qa import MathQA, as_number, final_answer, same
from environments.wiki_search import WikiSearch, exact_match, normalise, split_sections

PAGES = [
    {"id": "norvik_mills", "title": "Norvik Mills", "content": "# Norvik Mills\nA company.\n"
     "## History\nFounded by Ada Berg.\n### Early years\nThree looms.\n## History\nSold in 1950."},
    {"id": "ada_berg", "title": "Ada Berg", "content": "Born in Tolna."},
    {"id": "berg", "title": "Berg", "content": "#\nNo name.\n# Full\nNot the whole page."},
    {"id": "star:wars", "title": "Star Wars: The Film", "content": "intro\n# Plot: part 1\nText."},
    {"id": "empty", "title": "The River Norvik", "content": ""},
]  # fmt: skip
QUESTIONS = [{"question": f"Question {n}?", "answer": f"Answer {n}"} for n in range(8)]


def write(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wiki")
    write(folder / "corpus.jsonl", PAGES)
    write(folder / "questions.jsonl", QUESTIONS)
    return folder


@pytest.fixture(scope="module")
def wiki(files) -> WikiSearch:
    return WikiSearch(files / "corpus.jsonl", files / "questions.jsonl")


def wiki_of(folder: Path, pages: list[dict], **options) -> WikiSearch:
    questions = write(folder / "q.jsonl", QUESTIONS)
    return WikiSearch(write(folder / "c.jsonl", pages), questions, **options)


def says(text: str | None, **more) -> list[dict]:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": text, **more}]


# Words of the pages, what FTS5 and SQL read as syntax, and any characters at all, lone surrogates
# and NUL included.
fragments = st.sampled_from(
    [*"\"'*()^:+-{}# \0", "AND", "OR", "NOT", "NEAR(", "title:", "; DROP", "Norvik", "Mills",
     "berg", "norvik_", "norvik_mills", "norvik_mills:", "\ud800", "é", "\u0301", "\U0001fbf0"]
)  # fmt: skip
anything = st.text(st.characters(codec=None), max_size=20)  # surrogates too
texts = st.lists(fragments | anything, max_size=8).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


# --- calling tools -------------------------------------------------------------------------------


@given(tool=st.sampled_from(range(3)), text=texts)
@example(tool=0, text="")
@example(tool=0, text='"')
@example(tool=0, text='Norvik" OR "')
@example(tool=0, text="Norvik AND")
@example(tool=0, text="\0Norvik\0")
@example(tool=0, text="title:Norvik NEAR(Mills)")
@example(tool=0, text="word " * 5000 + " ".join(f"w{n}" for n in range(5000)))
@example(tool=1, text="\ud800")
@example(tool=2, text=":")
def test_any_string_is_an_argument(wiki, tool, text):
    name = wiki.tools[tool].__name__
    (argument,) = inspect.signature(wiki.tools[tool]).parameters
    answer = call_tool(wiki.tools, name, {argument: text})
    answer.encode()  # a tokenizer can read it
    if name == "search_pages":
        assert isinstance(json.loads(answer), list)
    elif text not in wiki.sections and text not in wiki.texts:
        assert answer.startswith("error: ")


@given(
    name=st.sampled_from(["search_pages", "view_sections", "read_section"]) | json_values,
    arguments=json_values
    | st.dictionaries(st.sampled_from(["query", "page_id", "section_id", "x"]), json_values),
)
def test_any_call_is_answered(wiki, name, arguments):
    call_tool(wiki.tools, name, arguments).encode()


def test_mistakes_are_told_to_the_model(wiki):
    def error(name, arguments):
        answer = call_tool(wiki.tools, name, arguments)
        assert answer.startswith("error: ")
        return answer

    assert "'search'" in error("search", {}) and "search_pages" in error("search", {})
    assert "object" in error("search_pages", ["Norvik"])
    assert "missing argument query" in error("search_pages", {})
    assert "unknown argument 'limit'" in error("search_pages", {"query": "a", "limit": 3})
    assert "type string" in error("search_pages", {"query": 3})
    assert "Page not found: nowhere" in error("view_sections", {"page_id": "nowhere"})
    assert "Page not found: nowhere" in error("read_section", {"section_id": "nowhere:history"})
    assert "Section not found: ada_berg:x" in error("read_section", {"section_id": "ada_berg:x"})
    assert "Section not found" in error("read_section", {"section_id": "star:wars:x"})
    assert "Expected: page_id:section_name" in error("read_section", {"section_id": "ada_berg"})
    assert "unknown tool 'x'" in call_tool([], "x", {})


def test_an_argument_that_is_long_is_not_repeated_in_full(wiki):
    assert len(call_tool(wiki.tools, "search_pages", {"query": ["x" * 10_000]})) < 200
    assert len(call_tool(wiki.tools, "x" * 10_000, {})) < 200


def test_a_bug_in_a_tool_is_not_the_models_mistake():
    def broken() -> str:
        """Breaks."""
        raise KeyError("x")

    with pytest.raises(KeyError):
        call_tool([broken], "broken", {})


def measure(name: str, count: int, share: float = 0.5, exact: bool = False) -> dict:
    """Measure a thing.

    More about it.

    Args:
        name: What it is called.
        share: How much: all or a part.
    """
    return {"name": name, "count": count, "share": share, "exact": exact}


def test_schema_is_that_of_the_signature():
    assert tool_schema(measure) == {
        "type": "function",
        "function": {
            "name": "measure",
            "description": "Measure a thing.",
            "parameters": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "description": "What it is called."},
                    "count": {"type": "integer"},
                    "share": {"type": "number", "description": "How much: all or a part."},
                    "exact": {"type": "boolean"},
                },
                "required": ["name", "count"],
            },
        },
    }
    with pytest.raises(TypeError, match="annotate value"):
        tool_schema(lambda value: value)


def test_schemas_of_wiki_search(wiki):
    schemas = [tool_schema(tool)["function"] for tool in wiki.tools]
    assert [s["name"] for s in schemas] == ["search_pages", "view_sections", "read_section"]
    assert [s["parameters"]["required"] for s in schemas] == [
        ["query"],
        ["page_id"],
        ["section_id"],
    ]
    for schema in schemas:
        assert schema["description"]
        assert all(p["description"] for p in schema["parameters"]["properties"].values())


scalars = st.sampled_from([None, True, 0, 1, 2.0, float("nan"), "ä", "1", [], {}])


@given(
    values=st.fixed_dictionaries(
        {"name": st.just("ä") | scalars, "count": st.just(3) | scalars},
        optional={"share": scalars, "exact": st.booleans() | scalars},
    )
)
@example(values={"name": "ä", "count": 3, "share": 1, "exact": True})
def test_types_are_those_of_json(values):
    """True is no integer, though Python thinks so; an integer is a number."""
    right = (
        type(values["name"]) is str
        and type(values["count"]) is int
        and type(values.get("share", 1)) in (int, float)
        and type(values.get("exact", True)) is bool
    )
    answer = call_tool([measure], "measure", values)
    assert answer.startswith("error: ") != right
    if right:
        assert f'"{values["name"]}"' in answer  # not escaped


# --- wiki_search: pages and sections -------------------------------------------------------------


headings = st.sampled_from(
    ["# A", "## A", "###   b c", "#", "# full", "# Full", "# a_2", "#a:b", "#A"]
)
lines = st.lists(
    headings | st.sampled_from(["", "text", " # no heading", "\r"]) | anything, max_size=9
)


@given(pages=st.lists(lines.map("\n".join), min_size=1, max_size=3))
@example(pages=["# A\n# A\n# A_2\n# a", "x"])
@example(pages=["# b:full", "# full"])
def test_sections_partition_the_page_and_each_can_be_read(tmp_path_factory, pages):
    names = ["a", "a:b", "b"]
    rows = [
        {"id": name, "title": name, "content": c} for name, c in zip(names, pages, strict=False)
    ]
    wiki = wiki_of(tmp_path_factory.mktemp("w"), rows)
    seen = set()
    for row in rows:
        content = call_tool(wiki.tools, "read_section", {"section_id": f"{row['id']}:full"})
        assert content == row["content"].encode("utf-8", "replace").decode()
        listed = json.loads(call_tool(wiki.tools, "view_sections", {"page_id": row["id"]}))
        ids = [section["section_id"] for section in listed]
        read = [call_tool(wiki.tools, "read_section", {"section_id": i}) for i in ids]
        assert not any(text.startswith("error: ") for text in read)
        assert seen.isdisjoint(ids) and len(set(ids)) == len(ids)
        assert all(i.startswith(f"{row['id']}:") for i in ids)
        seen.update(ids)
        if not any(line.startswith("#") for line in content.split("\n")):
            assert read == [content]
            continue
        whole = "\n" + content
        assert "\n".join(read) == whole[whole.index("\n#") + 1 :]
        assert all(text.startswith("#") and "\n#" not in text for text in read)


def test_ids_names_and_texts_of_sections(wiki):
    assert wiki.view_sections("norvik_mills") == [
        {"section_id": "norvik_mills:norvik_mills", "section_name": "Norvik Mills"},
        {"section_id": "norvik_mills:history", "section_name": "History"},
        {"section_id": "norvik_mills:early_years", "section_name": "Early years"},
        {"section_id": "norvik_mills:history_2", "section_name": "History"},
    ]
    assert wiki.read_section("norvik_mills:history") == "## History\nFounded by Ada Berg."
    assert wiki.read_section("norvik_mills:history_2") == "## History\nSold in 1950."
    assert wiki.view_sections("ada_berg") == [
        {"section_id": "ada_berg:full", "section_name": "Full Page"}
    ]
    assert wiki.read_section("berg:full_2") == "# Full\nNot the whole page."
    assert wiki.read_section("star:wars:plot:_part_1") == "# Plot: part 1\nText."
    assert split_sections("no heading") == []


def test_page_ids_come_from_the_titles_where_the_corpus_has_none(tmp_path):
    page = {"title": " Saint Anne ", "content": "Text."}
    assert list(wiki_of(tmp_path, [page]).sections) == ["saint_anne"]
    with pytest.raises(ValueError, match=r"c\.jsonl, line 2: .*'saint_anne'"):
        wiki_of(tmp_path, [page, {**page, "title": "saint anne"}])


# --- wiki_search: search -------------------------------------------------------------------------


def found(wiki: WikiSearch, query: str) -> list[str]:
    return [page["page_id"] for page in wiki.search_pages(query)]


def test_search_ranks_whole_matches_above_parts(wiki):
    assert found(wiki, "norvik MILLS?") == ["norvik_mills", "empty"]
    assert found(wiki, "Berg") == ["berg", "ada_berg"]
    assert found(wiki, "Tolna") == []  # the text of a page isn't searched
    assert found(wiki, '"OR"') == []
    assert wiki.search_pages("film") == [{"page_id": "star:wars", "title": "Star Wars: The Film"}]


words = st.sampled_from(["ada", "berg", "river", "mill", "the", "of"])
titles = st.lists(words, min_size=1, max_size=5).map(" ".join)


@given(titles=st.lists(titles, min_size=1, max_size=8), query=st.lists(words, max_size=4))
@example(titles=["ada", "ada the of of of", "the", "the of", "the mill"], query=["ada", "the"])
def test_search_finds_what_shares_a_word(tmp_path_factory, titles, query):
    rows = [{"id": f"p{n}", "title": title, "content": ""} for n, title in enumerate(titles)]
    folder = tmp_path_factory.mktemp("w")
    wiki, other = wiki_of(folder, rows), wiki_of(folder, rows[::-1], results=3)
    result = found(wiki, " ".join(query))
    shared = [set(query) & set(titles[int(page[1:])].split()) for page in result]
    assert all(shared)
    assert len(result) == sum(bool(set(query) & set(title.split())) for title in titles)
    whole = [words == set(query) for words in shared]
    assert whole == sorted(whole, reverse=True)
    # Neither the order of the corpus nor that of the query matters, and the best come first.
    assert found(other, " ".join(query[::-1]).upper()) == result[:3]


def test_search_ignores_accents_and_their_encoding(tmp_path):
    rows = [{"title": "Re\u0301sume\u0301 of Zu\u0308rich", "content": ""}]
    wiki = wiki_of(tmp_path, rows)
    assert all(wiki.search_pages(query) for query in ("résumé", "resume", "Zürich", "Zu\u0308rich"))


def test_search_works_in_another_thread(wiki):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: found(wiki, "Berg"), range(8))) == [["berg", "ada_berg"]] * 8


def test_sqlite_without_fts5_is_named(files, monkeypatch):
    def execute(statement):
        raise sqlite3.OperationalError("no such module: fts5")

    monkeypatch.setattr(sqlite3, "connect", lambda *_, **__: SimpleNamespace(execute=execute))
    with pytest.raises(RuntimeError, match="FTS5"):
        WikiSearch(files / "corpus.jsonl", files / "questions.jsonl")


# --- wiki_search: prompt and reward --------------------------------------------------------------


def test_prompt_holds_the_question_and_never_the_answer(wiki, tmp_path):
    task = wiki.train[0]
    assert [message["role"] for message in wiki.prompt(task)] == ["system", "user"]
    assert wiki.prompt(task)[-1]["content"] == task.question
    assert task.answer not in json.dumps(wiki.prompt(task))
    bare = wiki_of(tmp_path, PAGES, system_prompt="")
    assert bare.prompt(task) == [{"role": "user", "content": task.question}]


@given(text=texts)
@example(text="the")
@example(text="The The")
@example(text="!the a-n an")
def test_normalisation_is_idempotent(text):
    assert normalise(normalise(text)) == normalise(text)


@given(answer=texts, before=texts, after=texts)
def test_only_the_answer_alone_scores(answer, before, after):
    assert exact_match(answer, answer) == float(normalise(answer) != "")
    ramble = f"{before} {answer} {after}"
    if len(normalise(ramble)) > len(normalise(answer)):
        assert exact_match(ramble, answer) == 0


def test_reward(wiki):
    def reward(messages, answer="The Norvik Mills"):
        return wiki.reward(SimpleNamespace(answer=answer), messages)

    call = {"tool_calls": [{"function": {"name": "search_pages", "arguments": {"query": "a"}}}]}
    assert reward(says("norvik  mills.")) == 1
    assert reward(says("The answer is Norvik Mills")) == 0
    assert reward(says("Norvik Mills, Ada Berg, Tolna")) == 0
    assert reward(says("Norvik")) == 0
    assert reward(says("")) == reward(says("  ")) == reward(says(None)) == reward([]) == 0
    assert reward(says("!"), answer="?") == 0
    assert reward(says("The The"), answer="the the") == 1
    assert reward(says("Norvik Mills", **call)) == 0
    assert reward(says("Norvik Mills", tool_calls=[])) == 1
    assert reward(says("Norvik Mills") + [{"role": "tool", "content": "x"}] + says("Tolna")) == 0
    assert reward(says("Tolna", **call) + says("Norvik Mills")) == 1
    assert reward([{"role": "user", "content": "Norvik Mills"}]) == 0


def test_another_score_can_be_given(tmp_path):
    wiki = wiki_of(tmp_path, PAGES, score=lambda reply, answer: 0.5 * (answer in reply))
    assert wiki.reward(SimpleNamespace(answer="b"), says("a b c")) == 0.5
    assert wiki.reward(SimpleNamespace(answer=""), says("")) == 0


# --- math_qa -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "answer", "reward"),
    [
        (r"so \boxed{48}", "48", 1),
        (r"\boxed{47}, no, \boxed{48}", "48", 1),
        (r"\boxed{48}, no, \boxed{47}", "48", 0),
        (r"\boxed{48} and then \boxed{4", "48", 1),  # the last is cut off
        (r"\boxed{48} in 2 steps", "48", 1),
        (r"} \boxed{48}", "48", 1),
        (r"\boxed{} 48", "48", 0),
        (r"\boxed{\frac{3}{4}}", "0.75", 1),
        (r"-\frac{3}{4}", "-3/4", 1),
        (r"\boxed{\dfrac{6}{8}}", "3/4", 1),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", 1),
        (r"\boxed{\text{Monday}}", r"\text{Monday}", 1),
        (r"\boxed{ $1{,}200.00 }", "1200", 1),
        (r"\boxed{50\%}", "50", 1),
        (r"\boxed{x + 1.}", "X + 1", 1),
        (r"\boxed{1 1/2}", "11/2", 0),
        (r"\boxed{1/0}", "1/0", 1),
        ("The answer is 48.", "48", 1),
        ("First 48, then 49", "48", 0),
        ("It costs $1,200.50!", "1200.5", 1),
        ("It is \u22125", "-5", 1),
        ("9-5", "5", 1),
        ("9 - 4 = -5", "5", 0),
        (".5", "1/2", 1),
        ("1,2", "12", 0),
        ("x", "x", 0),  # not a number and not boxed
        ("48", "9 * 5 = 45\n45 + 3 = 48\n#### 48", 1),
        ("45", "9 * 5 = 45\n45 + 3 = 48\n#### 48", 0),
        ("", "48", 0),
        ("9" * 5000, "9" * 5000, 1),  # more digits than int() reads
    ],
)
def test_math_rewards(reply, answer, reward):
    math = SimpleNamespace(reward=MathQA.reward)
    assert math.reward(math, SimpleNamespace(answer=answer), says(reply)) == reward


@given(value=st.fractions(max_denominator=1000), others=st.lists(st.integers(0, 999)))
def test_a_number_is_the_same_in_every_form(value, others):
    forms = [str(value), rf"\frac{{{value.numerator}}}{{{value.denominator}}}"]
    if value.denominator == 1:
        forms += [f"{value.numerator:,}", f"${value.numerator}.00", f"{value.numerator}\\%"]
    else:
        assert not same(str(value), str(value.numerator))
    for form in forms:
        assert same(form, str(value)) and not same(form, str(value + 1))
        assert same(final_answer(f"{others} so it is {form}."), str(value))
        assert same(final_answer(f"{others} so \\boxed{{{form}}}, see {others}"), str(value))


@given(reply=texts | st.text("\\boxed{}$%/,.-123 ", max_size=40), answer=texts)
@example(reply="\\boxed{" * 3000 + "}" * 3000, answer="1")
@example(reply="1e999999999", answer="1e999999999")  # never 10 ** 999999999
def test_any_reply_is_scored(reply, answer):
    found = final_answer(reply)
    assert found is None or same(found, answer) in (False, True)


def test_shipped_questions_are_those_of_the_script_and_can_be_answered():
    path = Path(__file__).parents[1] / "assets" / "math_qa.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert rows == make(seed=0, number=200) != make(seed=1, number=200)
    assert all(isinstance(as_number(row["answer"]), Fraction) for row in rows)

    math = load_environment("math_qa", questions=path)
    assert (len(math.train), len(math.eval), math.tools) == (150, 50, [])
    assert not {task.question for task in math.train} & {task.question for task in math.eval}
    task = math.eval[0]
    system, user = math.prompt(task)
    assert "\\boxed{}" in system["content"] and user["content"] == task.question
    assert math.reward(task, says(f"It is \\boxed{{{task.answer}}}.")) == 1
    assert math.reward(task, says(f"It is \\boxed{{{task.answer}1}}.")) == 0


# --- files ---------------------------------------------------------------------------------------


GOOD = '{"question": "q", "answer": "a"}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: expected rows with columns question, answer"),
        ("\n \n", "is empty"),
        (GOOD + "{", ", line 2: .*Expecting"),
        (GOOD + "\n\n[1]", ", line 4: expected an object, not list"),
        ('{"question": "q", "reply": "a"}', ", line 1: no answer; it has question, reply"),
        ('{"question": "q", "answer": null}', ", line 1: no answer"),
        ('{"question": "q", "answer": ["a"]}', ", line 1: answer must be text or a number"),
        ('{"question": "q", "answer": true}', ", line 1: answer must be text or a number"),
        ('{"question": " ", "answer": "a"}', ", line 1: question must be text"),
        ('{"id": 7, "question": "q", "answer": "a"}\n' * 2, ", line 2: an earlier .* id '7'"),
        (GOOD + '{"id": "0", "question": "q", "answer": "a"}', ", line 2: an earlier .* id '0'"),
        (b"{}\n\n\xff\xfe", "can't be read: line 3: .*utf-8"),
        (None, "can't be read: .*No such file"),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path, text, message):
    path = tmp_path / "questions.jsonl"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*" + message) as raised:
        MathQA(path)
    assert "\n" not in str(raised.value)


def test_rows_are_text_and_other_columns_are_ignored(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"question": "a\xe2\x80\xa8b", "answer": 42, "filename": "x"}\r\n\r\n'
    )
    assert read_rows(path, ("question", "answer")) == [
        {"question": "a\u2028b", "answer": "42", "id": "0"}
    ]
    path.write_text('{"id": 5, "question": "\\ud800", "answer": 0.5}')
    assert read_rows(path, ("question", "answer")) == [
        {"question": "?", "answer": "0.5", "id": "5"}
    ]


@given(number=st.integers(1, 20))
def test_held_out_tasks_are_disjoint(tmp_path_factory, number):
    rows = [{"question": f"q{n}", "answer": "a"} for n in range(number)]
    path = write(tmp_path_factory.mktemp("q") / "q.jsonl", rows)
    train, held_out = load_tasks(path, None)
    assert [task.question for task in train + held_out] == [row["question"] for row in rows]
    assert len(held_out) == number // 4
    assert load_tasks(path, path) == (train + held_out, train + held_out)


def test_parquet_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for source in ("willcb/rare-wiki-pages", tmp_path / "rows.parquet"):
        with pytest.raises(ImportError, match=r"pip install pyarrow \(the extra \[data\]\)"):
            read_rows(source, ("question",))


@pytest.mark.parametrize("split", ["data/{}-", "{}/"])
def test_hub_dataset_is_read_from_its_train_files(tmp_path, monkeypatch, split):
    """With pyarrow and the Hub played by stand-ins: one reads our own JSONL, one has downloaded."""
    tmp_path = tmp_path / "training"  # a word that means nothing there
    names = [
        f"{split.format(part)}{number}"
        for part, number in (("train", "00001-of-2"), ("train", "00000-of-2"), ("test", "0-of-1"))
    ]
    for name in names:
        path = tmp_path / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, [{"question": name, "answer": "a"}])

    def read_table(path):
        return SimpleNamespace(to_pylist=lambda: [json.loads(path.read_text())])

    def snapshot_download(dataset, *, repo_type, allow_patterns):
        assert (dataset, repo_type) == ("willcb/wiki.v4", "dataset")
        matching = filter_repo_objects(
            [f"{n}.parquet" for n in names], allow_patterns=allow_patterns
        )
        assert list(matching) == [f"{name}.parquet" for name in names[:2]]
        return str(tmp_path)

    parquet = ModuleType("pyarrow.parquet")
    parquet.read_table = read_table
    monkeypatch.setitem(sys.modules, "pyarrow", ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    monkeypatch.setattr("environments.snapshot_download", snapshot_download)
    rows = read_rows("willcb/wiki.v4", ("question", "answer"))
    assert [row["question"] for row in rows] == [names[1], names[0]]
    assert [row["id"] for row in rows] == ["0", "1"]

    path = tmp_path / f"{names[2]}.parquet"
    assert read_rows(path, ("question",))[0]["question"] == names[2]
    with pytest.raises(ValueError, match="line 1: no title; it has question, answer"):
        read_rows(path, ("title",))
    with pytest.raises(ValueError, match="data/missing.parquet can't be read: .*No such file"):
        read_rows("data/missing.parquet", ("title",))  # a file, though it looks like owner/name


def test_local_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    path = tmp_path / "rows.parquet"
    from pyarrow.parquet import write_table

    write_table(pa.table({"question": ["q", "r"], "answer": [1, 2]}), path)
    assert [row["answer"] for row in read_rows(path, ("question", "answer"))] == ["1", "2"]
    path.write_text("not parquet")
    with pytest.raises(ValueError, match=r"rows\.parquet can't be read"):
        read_rows(path, ("question",))


def test_unknown_environment_lists_the_known():
    with pytest.raises(
        ValueError, match="unknown environment 'chess'; known: math_qa, wiki_search"
    ):
        load_environment("chess")


def test_an_environment_knows_no_tokens_and_no_tensors():
    folder = Path(__file__).parents[1] / "environments"
    for path in folder.glob("*.py"):
        imported = re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
        own = {"environments", "pyarrow", "huggingface_hub", "aiohttp"}
        assert all(name in sys.stdlib_module_names or name in own for name in imported)
