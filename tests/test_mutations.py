"""That tests/mutations.py still applies and its table is printed; the runs themselves are in CI."""

from pathlib import Path

import mutations


def test_every_mutation_finds_its_line():
    mutations.check_sources()


def test_the_table_in_the_readme_is_that_of_the_mutations():
    assert mutations.table() in (Path(__file__).parent / "README.md").read_text()


def test_a_mutation_that_changes_nothing_survives():
    harmless = mutations.Mutation(
        "none",
        "lora.py",
        "import math\n",
        "import math\n",
        "test_mutations.py::test_every_mutation_finds_its_line",
    )
    assert not mutations.turns_red(harmless)
