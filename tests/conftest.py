"""What holds for every test: no network, at most two threads, Hypothesis without a clock.

`CI=1 python -m pytest` draws the same examples each time and prints how to repeat a failure.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read at import: a forgotten download fails at once

import torch
from hypothesis import settings

# Shapes are tiny: on a large machine more threads would only wait for one another.
torch.set_num_threads(min(2, torch.get_num_threads()))

# No deadline: the first example of a test also pays for imports and allocations.
settings.register_profile("default", max_examples=25, deadline=None)
settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
