"""What holds for every test: no network, one thread, Hypothesis without a clock.

`CI=1 python -m pytest` draws the same examples each time and prints how to repeat a failure.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read at import: a forgotten download fails at once

import torch
from hypothesis import Phase, settings

# Shapes are tiny: more threads would only wait for one another, on busy cores ten times as long.
torch.set_num_threads(1)

# No deadline: the first example of a test also pays for imports and allocations.
settings.register_profile("default", max_examples=25, deadline=None)
settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True, print_blob=True)
# For tests/mutations.py, which asks whether a test fails, not for the smallest example.
ci = settings.get_profile("ci")
settings.register_profile("mutations", ci, phases=(Phase.explicit, Phase.generate))
settings.load_profile("ci" if os.environ.get("CI") else "default")
