"""Full fine-tuning: every weight trains. The baseline of what is claimed about LoRA.

    python train.py --full --lr 1.5e-4

The loop, the losses and the sampler are those of LoRA; this file is what LoRA does without:

                     LoRA                                    full fine-tuning
    trained          A and B                                 every weight, norms and embedding too
    reference        the adapter off: no memory              a second, frozen copy of the weights
    sampler          the base, with version k beside it      the trained weights themselves
    between steps    an adapter directory is published       cached keys and values are dropped
    checkpoint       A, B and their Adam moments             all weights, twice that in moments
    to deploy        a PEFT directory, the base as it was    a Hugging Face checkpoint of its own

An engine in another process would have to be sent every weight after every step; the embedded one
computes with the very tensors that the optimizer writes, so there is no broadcast here.

Left out on purpose: half-precision weights (an update below 1/256 of a bfloat16 weight is rounded
away, so they need fp32 masters beside them), sharded files.
"""

import json
import os
import shutil
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from checkpoint import check_tensors, checkpoint_directory, read_checkpoint, read_json
from experts import split_experts
from lora import trainable

# What stands beside the weights in a Hugging Face checkpoint, where the model that was trained has
# it: how to tokenize, how to render a chat, where to stop.
COMPANIONS = """generation_config.json tokenizer.json tokenizer_config.json chat_template.jinja
    special_tokens_map.json added_tokens.json vocab.json merges.txt""".split()


def check_finite(model: nn.Module) -> None:
    """ValueError, with its name, for a trained parameter that holds NaN or infinity."""
    for name, tensor in trainable(model).items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} holds NaN or infinity, so it is neither used nor saved")


def save_weights(model: nn.Module, directory: Path) -> None:
    """Writes model.safetensors into a directory, which is made; bytes that survive a power cut.

    Raises ValueError for a weight that is not finite, OSError for a disk that is full.
    """
    check_finite(model)
    state = split_experts(model.state_dict())  # a tensor an expert, as checkpoints have it
    tensors = {name: t.detach().cpu().contiguous() for name, t in state.items()}
    directory.mkdir(parents=True)
    # As bytes: safetensors' own writing hides what the system said of a failure.
    data = safetensors.torch.save(tensors, metadata={"format": "pt"})
    with (directory / "model.safetensors").open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def load_weights(model: nn.Module, directory: Path) -> None:
    """Copies model.safetensors into the model, in place: an optimizer keeps its parameters.

    Raises ValueError, and changes nothing, unless every tensor is there and has its shape.
    """
    tensors, state = read_checkpoint(directory), split_experts(model.state_dict())
    check_tensors(directory, state, tensors)
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(tensors[name])


def save_model(model: nn.Module, directory: Path, source: str) -> None:
    """Writes a Hugging Face checkpoint that transformers, vLLM and Qwen3.from_pretrained load.

    source: the checkpoint that was trained; its config.json, but for the dtype, and its tokenizer
    stay as they are.
    """
    origin = checkpoint_directory(source)
    save_weights(model, directory)
    config = read_json(origin / "config.json")
    key = "dtype" if "dtype" in config else "torch_dtype"  # transformers 5 and 4
    config[key] = str(next(model.parameters()).dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in COMPANIONS:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, directory / name)
