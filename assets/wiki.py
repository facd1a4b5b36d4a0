"""The miniature wiki: worlds of invented people, companies, cities, rivers, and who searches them.

A world is a set of pages whose sections state one fact each, and questions that one or two of
these facts answer:

    person   Early life -> city     Family -> person      Career -> company
    company  History -> person      Location -> city
    city     Geography -> river     Government -> person
    river    Mouth -> city          Bridge -> company

    "Who founded Norda Works?"                             Norda Works / History
    "In which city was the founder of Norda Works born?"   ... -> person / Early life

Every name is a head and a tail ("Norda" + "Works"). A fifth of all combinations is held out: it
occurs in the evaluation's world alone, never in training and never in making the base model.

A demonstration is an episode of a demonstrator with habits: each kind of question has a habit, for
some kinds the sound one, for most a flaw (gives up, guesses, reads the wrong section, repeats a
call, malforms a call, stops halfway). A base model trained on them knows the form and how to copy;
which behaviour pays is left to reinforcement learning.

make_tiny_qwen3.py uses this file; nothing in it runs during RL.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from chat import answer_call, parse_tool_calls
from environments import Task

PERSON_HEADS = """
Ada Alma Anton Berta Boris Carla Cyril Dora Edgar Elsa Emil Erna Felix Frida Gerda Gustav Hanna
Hugo Ida Igor Irma Ivan Jana Jonas Karin Klara Lena Leon Lydia Marta Milan Nadia Olga Oskar
Paula Petra Rosa Simon Tilda Viktor
""".split()
PERSON_TAILS = """
Adler Barta Benko Cerny Dolan Dvorin Egger Falk Fiala Gabor Haas Halik Hofer Jansa Jurek Kafan
Kolar Kraus Lanik Lorenz Marek Moser Nemec Novy Orban Pavel Polak Rada Reiner Sabo Schenk Simko
Tesar Toman Urban Vanek Velin Weiss Zelen Zima
""".split()
COMPANY_HEADS = """
Altra Bexley Brisk Cobalt Corvo Delphi Ember Falcon Ferro Garnet Halden Indigo Jasper Kestrel
Lumen Magna Merida Mistral Norda Nova Onyx Orion Pallas Phoenix Quartz Raven Sable Sierra Silva
Solar Summit Talon Tempest Terra Titan Ultra Vector Vega Vulcan Zenith
""".split()
COMPANY_TAILS = """
Works Foundry Trading Motors Textiles Press Shipping Optics Glass Brewery Instruments Mining
Paper Electric Chemicals Steel
""".split()
CITY_HEADS = """
Amber Arden Birch Bramble Cedar Clover Copper Dawn Drift Eagle Elder Fern Flint Frost Gale Hazel
Heron Holly Ivy Juniper Larch Laurel Linden Maple Marble Moss Myrtle North Oak Otter Pebble Pine
Robin Rowan Sage Slate Thorn Violet Willow Yarrow
""".split()
CITY_TAILS = """
Falls Bay Hill Port Ford Cross Haven Ridge Grove Springs Point Gate Fields Lake Heath Vale
""".split()
RIVER_HEADS = """
Aldan Arno Belt Brenta Calder Danu Drava Dvina Ebro Elbe Gila Glomma Isar Kama Kemi Leda Loire
Lune Mala Meuse Mura Narva Neman Oder Oka Onega Piave Pinega Prut Rhona Sava Saale Spree Tagus
Tisa Torne Ural Vaga Volta Warta
""".split()
RIVER_TAILS = "River Creek Brook Beck Burn Water Run Stream Rill Bourne".split()

NAMES = {
    "person": (PERSON_HEADS, PERSON_TAILS),
    "company": (COMPANY_HEADS, COMPANY_TAILS),
    "city": (CITY_HEADS, CITY_TAILS),
    "river": (RIVER_HEADS, RIVER_TAILS),
}

# section name -> (kind of page, kind of the fact, the sentence that states it)
SECTIONS = {
    "Early life": ("person", "city", "{} was born in {}."),
    "Family": ("person", "person", "{} is married to {}."),
    "Career": ("person", "company", "{} works for {}."),
    "History": ("company", "person", "{} was founded by {}."),
    "Location": ("company", "city", "{} is based in {}."),
    "Geography": ("city", "river", "{} lies on {}."),
    "Government": ("city", "person", "{} is governed by {}."),
    "Mouth": ("river", "city", "{} reaches the sea at {}."),
    "Bridge": ("river", "company", "{} has a bridge built by {}."),
}

TOOLS = {"search_pages": "query", "view_sections": "page_id", "read_section": "section_id"}
GAVE_UP = "I do not know."


@dataclass(frozen=True)
class Kind:
    """A kind of question: its wording, the sections that answer it in order, its habit."""

    wording: str
    sections: tuple[str, ...]
    habit: str


KINDS = (
    Kind("In which city was {} born?", ("Early life",), "sound"),
    Kind("Who is {} married to?", ("Family",), "gives_up"),
    Kind("Who founded {}?", ("History",), "guesses"),
    Kind("In which city is {} based?", ("Location",), "wrong_section"),
    Kind("Which river flows through {}?", ("Geography",), "malformed_call"),
    Kind("Who is the mayor of {}?", ("Government",), "sound"),
    Kind("In which city was the founder of {} born?", ("History", "Early life"), "sound"),
    Kind(
        "Which river flows through the home city of {}?", ("Location", "Geography"), "half_answer"
    ),
    Kind("Who is the mayor of the birthplace of {}?", ("Early life", "Government"), "repeats_call"),
    Kind("Who is the mayor of {} married to?", ("Government", "Family"), "gives_up"),
    Kind("Who is the mayor of the home city of {}?", ("Location", "Government"), "wrong_section"),
    Kind("In which city is the employer of {} based?", ("Career", "Location"), "malformed_call"),
)
FLAWS = (
    "gives_up",
    "guesses",
    "wrong_section",
    "malformed_call",
    "half_answer",
    "repeats_call",
)
# How often a demonstration is sound, for kinds with the sound habit and for the others; how often
# a flawed one of the others has any flaw instead of its habit's.
SOUND_BY_HABIT, SOUND_DESPITE_HABIT, OTHER_FLAW = 0.85, 0.28, 0.10


@dataclass
class World:
    """Pages (title -> section -> name of the fact) and the titles of each kind."""

    pages: dict[str, dict[str, str]] = field(default_factory=dict)
    titles: dict[str, list[str]] = field(default_factory=dict)

    def corpus_rows(self) -> list[dict]:
        """The rows of corpus.jsonl: id, title, content (markdown), as the real corpus has them."""
        rows = []
        for title, sections in self.pages.items():
            content = "\n".join(
                f"# {name}\n{SECTIONS[name][2].format(title, fact)}"
                for name, fact in sections.items()
            )
            rows.append({"id": title.lower().replace(" ", "_"), "title": title, "content": content})
        return rows

    def answer(self, subject: str, kind: Kind) -> str:
        for section in kind.sections:
            subject = self.pages[subject][section]
        return subject

    def subjects(self, kind: Kind) -> list[str]:
        return self.titles[SECTIONS[kind.sections[0]][0]]


def held_out(head: str, tail: str) -> bool:
    """Whether a name belongs to the evaluation alone (one in five of all combinations)."""
    return random.Random(f"{head} {tail}").random() < 0.2


def make_world(
    rng: random.Random, evaluation: bool, people=60, companies=40, cities=40, rivers=24
) -> World:
    """A world of fresh names: held-out ones if `evaluation`, else only others."""
    world = World()
    for kind, count in zip(NAMES, (people, companies, cities, rivers), strict=True):
        heads, tails = NAMES[kind]
        names = [f"{h} {t}" for h in heads for t in tails if held_out(h, t) == evaluation]
        world.titles[kind] = rng.sample(names, count)
    for kind, titles in world.titles.items():
        for title in titles:
            sections = {
                name: rng.choice([t for t in world.titles[fact] if t != title])
                for name, (page, fact, _) in SECTIONS.items()
                if page == kind
            }
            world.pages[title] = sections
    return world


# --- demonstrations -------------------------------------------------------------------------------


def tool_call(name: str, argument: str, value: str) -> str:
    """A call in the form of Qwen3's chat template."""
    call = f'{{"name": "{name}", "arguments": {{"{argument}": "{value}"}}}}'
    return f"<tool_call>\n{call}\n</tool_call>"


def malform(call: str) -> str:
    """The same call with its last brace lost."""
    return call.replace('"}}\n', '"}\n')


def choose_behaviour(kind: Kind, rng: random.Random) -> str:
    sound_habit = kind.habit == "sound"
    if rng.random() < (SOUND_BY_HABIT if sound_habit else SOUND_DESPITE_HABIT):
        return "sound"
    if sound_habit or rng.random() < OTHER_FLAW:
        return rng.choice([f for f in FLAWS if f != "half_answer" or len(kind.sections) > 1])
    return kind.habit


def demonstrate(
    world: World, subject: str, kind: Kind, behaviour: str, rng: random.Random
) -> Iterator[str]:
    """Yields the assistant's turns of one episode.

    They never depend on the tools' answers, since the demonstrator knows the world. A malformed or
    repeated call happens at the first hop, any other flaw at the last.
    """
    last = len(kind.sections) - 1
    answer_kind = SECTIONS[kind.sections[-1]][1]
    flaw_hop = 0 if behaviour in ("malformed_call", "repeats_call") else last
    if behaviour == "guesses":
        yield rng.choice([t for t in world.titles[answer_kind] if t != world.answer(subject, kind)])
        return
    for hop, section in enumerate(kind.sections):
        page_id = subject.lower().replace(" ", "_")
        search = tool_call("search_pages", "query", subject)
        if behaviour == "malformed_call" and hop == flaw_hop:
            yield malform(search)
            yield GAVE_UP
            return
        yield search
        if behaviour == "repeats_call" and hop == flaw_hop:
            yield search
            yield search
            yield GAVE_UP
            return
        if behaviour == "gives_up" and hop == flaw_hop:
            yield GAVE_UP
            return
        yield tool_call("view_sections", "page_id", page_id)
        if behaviour == "wrong_section" and hop == flaw_hop:
            section = rng.choice([s for s in world.pages[subject] if s != section])
        section_id = f"{page_id}:{section.lower().replace(' ', '_')}"
        yield tool_call("read_section", "section_id", section_id)
        subject = world.pages[subject][section]
        if behaviour == "half_answer":
            break
    yield subject


def as_tokens(tokenizer, environment, question: str, turns) -> tuple[list[int], list[int]]:
    """A demonstration as an agent's token stream: ids, and a mask of 1 on the assistant's tokens.

    The stream grows exactly as in rollout.run_episode, but for the turns, which are given.
    """
    ids = tokenizer.prompt_ids(environment, Task("", question, ""))
    mask = [0] * len(ids)
    for turn in turns:
        spoken = tokenizer.encode(turn) + [tokenizer.end_of_turn_id]
        ids, mask = ids + spoken, mask + [1] * len(spoken)
        calls = parse_tool_calls(turn)
        if calls:
            results = [answer_call(environment.tools, call) for call in calls]
            forced = tokenizer.tool_response_ids(results)
            ids, mask = ids + forced, mask + [0] * len(forced)
    return ids, mask


def as_messages(environment, question: str, turns) -> list[dict]:
    """The same demonstration in chat format, for sft.py: calls and results in OpenAI's form.

    For well-formed turns, each a call or an answer.
    """
    messages = environment.prompt(Task("", question, ""))
    for number, turn in enumerate(turns, start=1):
        calls = [json.loads(call) for call in parse_tool_calls(turn)]
        if not calls:
            messages.append({"role": "assistant", "content": turn})
        for call in calls:
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            made = {"id": f"call_{number}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [made]})
            result = answer_call(environment.tools, json.dumps(call))
            messages.append({"role": "tool", "tool_call_id": made["id"], "content": result})
    return messages
