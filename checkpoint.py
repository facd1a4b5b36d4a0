"""Hugging Face checkpoints, read strictly: local or from the Hub, one safetensors file or shards.

    directory/
      config.json                       read_json
      model.safetensors                 read_checkpoint, or all shards of
      model.safetensors.index.json      tensor -> shard

Every tensor that the model has must be there with its shape, and none besides: what is missing,
surplus or misshapen is listed (check_tensors), since a model that runs with a fresh weight in it
looks merely bad.

Left out on purpose: pickled .bin files, which run code as they load.
"""

import json
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor

PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt")


def checkpoint_directory(path: str | Path, patterns: tuple[str, ...] = PATTERNS) -> Path:
    """The directory of a checkpoint: `path` itself, or the Hub's snapshot of that id, of which the
    files that fit `patterns` are downloaded."""
    if Path(path).is_dir():
        return Path(path)
    text = str(path)
    if Path(path).is_absolute() or text.startswith(".") or text.count("/") != 1:
        raise ValueError(f"{path}: no such directory (and not a Hub id of the form owner/name)")
    try:
        return Path(snapshot_download(text, allow_patterns=list(patterns)))
    except Exception as error:  # the Hub client raises a dozen unrelated types
        raise ValueError(
            f"{path}: no such directory, and the Hub gave no checkpoint of that name "
            f"({type(error).__name__}: {error})"
        ) from error


def read_json(file: Path) -> dict:
    """The JSON object in `file`."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of the JSON or of its encoding
        raise ValueError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: a JSON object is expected, found {type(raw).__name__}")
    return raw


def check_fields(
    where: Path | str, raw: dict, kinds: dict[str, type], zeros: tuple[str, ...] = ()
) -> None:
    """ValueError for a field of `raw` of another type than its kind (an int is a float too), and
    for a whole number below 1, or below 0 in `zeros`. What is null or absent passes."""
    for name, kind in kinds.items():
        value = raw.get(name)
        if value is not None and type(value) not in (kind, int if kind is float else kind):
            raise ValueError(f"{where}: {name} must be {kind.__name__}, not {value!r}")
        if type(value) is int and value < (name not in zeros):
            raise ValueError(f"{where}: {name} must be {int(name not in zeros)} or more: {value}")


def read_checkpoint(directory: Path) -> dict[str, Tensor]:
    """Every tensor of model.safetensors, or of the shards that the index names."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index}: missing weight_map, the table of tensor -> file")
        check_fields(index, weight_map, dict.fromkeys(weight_map, str))
        files = sorted(set(weight_map.values()))
    else:
        files = ["model.safetensors"]
    tensors = {}
    for name in files:
        if not (directory / name).is_file():
            raise ValueError(f"{directory / name}: no such file; the checkpoint is incomplete")
        try:
            with safe_open(directory / name, framework="pt") as shard:
                part = {key: shard.get_tensor(key) for key in shard.keys()}
        except Exception as error:  # safetensors' own error type derives from Exception alone
            raise ValueError(f"{directory / name}: unreadable ({error})") from error
        for key in tensors.keys() & part.keys():
            if not part[key].equal(tensors[key]):
                raise ValueError(f"{directory / name}: an earlier file has another {key}")
        tensors |= part
    return tensors


def check_tensors(where: Path | str, expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """ValueError listing what `found` lacks, has too much, or has as integers or misshapen."""
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [f"surplus {name}" for name in found if name not in expected]
    problems += [
        f"{name} has shape {tuple(found[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    problems += [f"{n} is {t.dtype}" for n, t in found.items() if not t.is_floating_point()]
    if problems:
        shown = "\n  ".join(problems[:20])
        rest = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ValueError(f"{where}: the tensors do not fit the config\n  {shown}{rest}")
