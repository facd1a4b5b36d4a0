"""wiki-search: answer a question by searching a wiki, reading page by page, section by section.

    search_pages("Norvik Mills")         ->  [{"page_id": "norvik_mills", "title": ...}, ...]
    view_sections("norvik_mills")        ->  [{"section_id": "norvik_mills:history", ...}, ...]
    read_section("norvik_mills:history") ->  "## History ..."

Tools, ids and sections are those of the environment that prime-rl trains on (verifiers,
environments/wiki_search). Three things differ: search matches words of the titles (SQLite's FTS5)
instead of embeddings, so it needs no model and ranks the same everywhere; a heading that occurs
twice on a page gets two ids; and the reward is a rule by default, a judge (judge.py) on demand:

    exact      1 for the answer and nothing else, so a reply that rambles until it has named it
               earns nothing
    overlap    the share of the answer's words that the reply has, 0 for more than REPLY_WORDS words
    judge      what a language model says of it
"""

import re
import sqlite3
import unicodedata
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count, pairwise

from environments import Source, Task, final_reply, load_tasks, read_rows
from environments.judge import Judge

SYSTEM_PROMPT = (
    "Use the provided Wikipedia search tools to help answer questions. "
    "When confident, reply with the short final answer and nothing else."
)
REPLY_WORDS = (
    32  # a word and its neighbours explain an answer; more would pay for naming everything
)
MAX_TERMS = 64  # of a query: more than a title has, and any query takes milliseconds


def exact_match(reply: str, answer: str) -> float:
    reply = normalise(reply)
    return float(reply != "" and reply == normalise(answer))


def overlap(reply: str, answer: str) -> float:
    """Recall of the answer's words, as a multiset; order and other words count for nothing, up to a
    length at which naming many candidates would pay."""
    said, wanted = normalise(reply).split(), normalise(answer).split()
    if not wanted or len(said) > REPLY_WORDS:
        return 0.0
    return (Counter(said) & Counter(wanted)).total() / len(wanted)


SCORES = {"exact": exact_match, "overlap": overlap}


def normalise(text: str) -> str:
    """As SQuAD's evaluation: lower case, no punctuation, no articles, single spaces."""
    words = re.sub(r"[^\w\s]|_", "", unicodedata.normalize("NFC", text).lower()).split()
    return " ".join([word for word in words if word not in ("a", "an", "the")] or words)


class WikiSearch:
    """Corpus: rows of title, content (markdown), id (by default made from the title). Questions:
    rows of question, answer; without `eval_questions` their last quarter is held out."""

    def __init__(
        self,
        corpus: Source,
        questions: Source,
        eval_questions: Source | None = None,
        *,
        results: int = 10,
        system_prompt: str = SYSTEM_PROMPT,
        score: Callable[[str, str], float] = exact_match,
        judge: Judge | None = None,
    ):
        self.train, self.eval = load_tasks(questions, eval_questions)
        self.results, self.system_prompt, self.score = results, system_prompt, score
        self.judge = judge  # if there is one, in the place of score
        self.tools = [self.search_pages, self.view_sections, self.read_section]  # see tool_schema

        pages = read_rows(corpus, ("title", "content"), lambda row: as_id(row["title"]))
        self.texts = {f"{page['id']}:full": page["content"] for page in pages}  # by section id
        self.sections = {page["id"]: self.add_sections(page["id"]) for page in pages}
        self.index = title_index([(page["id"], page["title"]) for page in pages])

    def add_sections(self, page_id: str) -> list[dict]:
        """Puts a page's sections into self.texts and lists them; a second "history" there is
        history_2, and a page without headings is one section."""
        whole, listed = f"{page_id}:full", []
        for name, text in split_sections(self.texts[whole]):
            first, suffix = f"{page_id}:{as_id(name)}", count(2)
            section_id = first
            while section_id in self.texts:
                section_id = f"{first}_{next(suffix)}"
            self.texts[section_id] = text
            listed.append({"section_id": section_id, "section_name": name})
        return listed or [{"section_id": whole, "section_name": "Full Page"}]

    def prompt(self, task: Task) -> list[dict]:
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": task.question}]

    def reward(self, task: Task, messages: list[dict]) -> float | Awaitable[float]:
        """The score of the last reply, or what a judge will say of it; 0 for an empty one and for
        one that still calls a tool."""
        reply = final_reply(messages)
        if not reply.strip():
            return 0.0
        if self.judge:
            return self.judge.grade(task.question, task.answer, reply)
        return self.score(reply, task.answer)

    def outcome(self, task: Task, messages: list[dict], reward: float) -> str:
        """What became of an episode, in words: to count kinds of failure, never to reward."""
        said = [m["content"] for m in messages if m["role"] == "assistant"]
        heard = [m["content"] for m in messages if m["role"] == "tool"]
        if reward > 0:
            return "solved" if reward == 1 else "partly right"
        if not heard:
            return "guessed"
        if any(text.startswith("error: malformed") for text in heard):
            return "malformed call"
        if len(set(said)) < len(said):
            return "repeated call"
        if "<tool_call>" in said[-1]:
            return "unfinished"
        if "not know" in said[-1] or "not find" in said[-1] or "nable" in said[-1]:
            return "gave up"
        return "wrong answer"

    def search_pages(self, query: str) -> list[dict]:
        """Search for relevant pages by title.

        Args:
            query: The query to search for.
        """
        # Only words reach FTS5, each in quotes, so nothing in a query is an operator.
        words = re.findall(r"[^\W_]+", unicodedata.normalize("NFC", query))
        terms = [f'"{word}"' for word in dict.fromkeys(words)][:MAX_TERMS]
        if not terms:
            return []
        found = self.index.execute(
            """SELECT page_id, title FROM titles WHERE titles MATCH ?
            ORDER BY rowid IN (SELECT rowid FROM titles WHERE titles MATCH ?) DESC, rank, page_id
            LIMIT ?""",  # titles with all terms, then those with some; each by bm25 (rank)
            (" OR ".join(terms), " AND ".join(terms), self.results),
        )
        return [{"page_id": page_id, "title": title} for page_id, title in found]

    def view_sections(self, page_id: str) -> list[dict]:
        """View the sections of a page.

        Args:
            page_id: The ID of the page to view.
        """
        if page_id not in self.sections:
            raise ValueError(f"Page not found: {page_id}")
        return self.sections[page_id]

    def read_section(self, section_id: str) -> str:
        """Read a section of a page.

        Args:
            section_id: The ID of the section to read.
        """
        if ":" not in section_id:
            raise ValueError("Invalid section_id format. Expected: page_id:section_name")
        if section_id not in self.texts:
            known = any(section_id.startswith(f"{page_id}:") for page_id in self.sections)
            raise ValueError(f"{'Section' if known else 'Page'} not found: {section_id}")
        return self.texts[section_id]


def title_index(pages: list[tuple[str, str]]) -> sqlite3.Connection:
    index = sqlite3.connect(":memory:", check_same_thread=False)  # rollouts may have a thread
    try:
        index.execute("CREATE VIRTUAL TABLE titles USING fts5(page_id UNINDEXED, title)")
    except sqlite3.OperationalError as error:
        raise RuntimeError(f"wiki_search needs a Python whose SQLite has FTS5: {error}") from None
    index.executemany("INSERT INTO titles VALUES (?, ?)", pages)
    return index


def split_sections(content: str) -> list[tuple[str, str]]:
    """(name, text) from each line that starts with "#" to before the next one, of any level."""
    lines = content.split("\n")
    starts = [number for number, line in enumerate(lines) if line.startswith("#")]
    return [
        (lines[start].lstrip("#").strip(), "\n".join(lines[start:end]))
        for start, end in pairwise([*starts, len(lines)])
    ]


def as_id(text: str) -> str:
    return text.strip().lower().replace(" ", "_")
