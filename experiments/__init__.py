"""Claims of the literature about LoRA in RL, each repeated by a script; `python -m experiments`."""
