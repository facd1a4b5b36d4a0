"""Adapter broadcasting: the trained matrices as a PEFT directory, published once and atomically.

        trainer                   root, a run's broadcasts/                           sampler
        publish ──► .v000018.tmp-4711/   written, fsynced, read back, compared
                          │ os.rename, the one moment at which readers see it
                          ▼
                     v000018/   adapter_config.json, adapter_model.safetensors ──► read_adapter,
                          │ retire: os.rename, then emptied                        PEFT, vLLM
                          ▼
                    .v000018.retired/    stays, empty: the path is never free again

Why a path is never used twice: inference engines key their prefix cache by an adapter's name and
path, not by its bytes, so new weights at an old path answer with old keys and values (vLLM#42125).

Why reading is strict: a sampler that lost its adapter answers as the base model, and nothing looks
wrong but the reward. vLLM accepts a foreign key prefix, fewer columns than the layer has, an `r`
that is not the tensors' rank; here a ValueError names what is amiss and where.

Tensor names: "model.layers.0.self_attn.q_proj.lora_A.weight" (R, in) and ".lora_B.weight" (out, R),
as in lora_parameters; in the file each begins with PEFT's prefix "base_model.model.". Experts are
stacked in memory and have one tensor each in the file, the form that both vLLM and PEFT load:
"model.layers.0.mlp.experts.7.up_proj.lora_A.weight".

Left out on purpose: PEFT's variants (DoRA, rsLoRA, a rank per layer, biases), which are refused by
name, and the loading into an engine, which engine.py and client.py do.
"""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from experts import split_experts, stack_experts
from lora import TRAINABLE, LoRAConfig, lora_layers, lora_parameters, target_of

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
KEY = re.compile(re.escape(PREFIX) + r"(.+)\.lora_([AB])\.weight")
VERSION = re.compile(r"v(\d{6,})")

# The options of a PEFT config that change what an adapter computes -> the values implemented here.
OFF = dict.fromkeys(
    """use_dora use_rslora use_qalora use_bdlora lora_bias fan_in_fan_out rank_pattern alpha_pattern
    modules_to_save target_parameters trainable_token_indices layer_replication
    alora_invocation_tokens""".split(),
    (None, False, [], {}),
)
IMPLEMENTED = OFF | {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Other initialisations (PiSSA, OLoRA, ...) change the base to which the adapter belongs.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}


# --- writing --------------------------------------------------------------------------------------


def save_adapter(
    model: nn.Module, config: LoRAConfig, directory: str | Path, base_model: str = ""
) -> Path:
    """Writes the trainable adapter as a directory that PEFT and vLLM load as it is; its full path.

    All or nothing: written beside, read back, compared, renamed into place. Equal adapters give
    equal bytes. Raises ValueError for NaN or infinity (with the tensor) and for a config that is
    not the adapter's, FileExistsError where something is, OSError (a full disk) with the path.
    """
    directory = Path(directory).absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory}: exists already; an adapter is never written over")
    _check_config(model, config)
    tensors = _on_host(lora_parameters(model))
    for name, tensor in tensors.items():
        if not all_finite(tensor):
            raise ValueError(f"{name} holds NaN or infinity, so the adapter is not written")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or None,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha % 1 == 0 else config.alpha,  # PEFT: an int
        "lora_dropout": config.dropout,
        # Not "experts": PEFT knows them by their projections' names; vLLM looks at the tensors. Of
        # a mixture's dense MLPs PEFT leaves the adapters out, in any form (run.py: peft_misses).
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    single = split_experts(tensors)
    prefixed = {PREFIX + name: tensor.contiguous() for name, tensor in single.items()}
    data = safetensors.torch.save(prefixed, metadata={"format": "pt"})
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.with_name(f".{directory.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)  # of a dead process that had our id
    try:
        with naming(directory):
            temporary.mkdir()
            (temporary / TENSOR_FILE).write_bytes(data)
            (temporary / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")
            for path in (temporary / TENSOR_FILE, temporary / CONFIG_FILE, temporary):
                _fsync(path)
            _, written = read_adapter(temporary)
            for name, tensor in tensors.items():
                if name not in written or not torch.equal(tensor, written[name]):
                    raise ValueError(f"{temporary}: {name} reads back other than it was written")
            os.rename(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already if all went well
    _fsync(directory.parent)
    return directory


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A write that fails does not say where: inside, its OSError does."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """fp32 copies on the CPU; a GPU's all under way, into pinned memory, before one is awaited."""
    copies = {}
    for name, tensor in tensors.items():
        copies[name] = torch.empty(tensor.shape, pin_memory=tensor.is_cuda)
        copies[name].copy_(tensor.detach(), non_blocking=True)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return copies


def _check_config(model: nn.Module, config: LoRAConfig) -> None:
    """ValueError unless the model's trainable adapter has the rank and the scaling of `config`."""
    layers = {n: layer for n, layer in lora_layers(model).items() if TRAINABLE in layer.lora_A}
    if not layers:
        raise ValueError("the model has no trainable adapter; inject_lora puts one in")
    for name, layer in layers.items():
        found = (layer.lora_A[TRAINABLE].shape[-2], layer.scaling[TRAINABLE])
        if found != (config.rank, config.scaling):
            raise ValueError(
                f"{name}: rank and scaling (alpha / rank) are {found} in the model, but "
                f"{(config.rank, config.scaling)} in the config of the adapter"
            )


def all_finite(tensor: Tensor) -> bool:
    """No NaN and no infinity: both show in the extremes, at a sixth of the time of a full look."""
    return tensor.numel() == 0 or bool(torch.isfinite(torch.stack(tensor.aminmax())).all())


def _fsync(path: Path) -> None:
    """Makes a file's bytes, or a directory's entries, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading --------------------------------------------------------------------------------------


def read_adapter(directory: str | Path) -> tuple[LoRAConfig, dict[str, Tensor]]:
    """Config and tensors (fp32, named as lora_parameters names them) of a PEFT directory.

    Raises ValueError, with the file and the field or tensor, for anything that is missing, damaged,
    not finite, contradictory, or asks for what this project does not compute.
    """
    config_file, tensor_file = Path(directory) / CONFIG_FILE, Path(directory) / TENSOR_FILE
    for file in (config_file, tensor_file):
        if not file.is_file():
            raise ValueError(
                f"{file}: no such file; an adapter directory, as save_adapter and PEFT write it, "
                f"holds {CONFIG_FILE} and {TENSOR_FILE}"
            )
    config, targets = _read_config(config_file)
    tensors = _read_tensors(tensor_file, config.rank)
    layers = sorted({name.rpartition(".lora_")[0] for name in tensors})
    if isinstance(targets, str):  # to PEFT a pattern for whole names
        problems = [
            f"{name} does not match it" for name in layers if not re.fullmatch(targets, name)
        ]
    else:  # ends of names
        fits = {(t, name) for t in targets for name in layers if f".{name}".endswith(f".{t}")}
        problems = [f"no tensor adapts {t}" for t in targets if t not in {t for t, _ in fits}]
        problems += [f"{n} is adapted too" for n in layers if n not in {n for _, n in fits}]
    _refuse(config_file, problems, "target_modules does not agree with the tensors; correct it")
    target_modules = tuple(sorted({target_of(name) for name in layers}))
    try:
        tensors = stack_experts(tensors)
    except ValueError as error:
        raise ValueError(f"{tensor_file}: {error}; write the adapter again") from error
    return dataclasses.replace(config, target_modules=target_modules), tensors


def _read_config(file: Path) -> tuple[LoRAConfig, list[str] | str]:
    try:
        raw = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON ({error}); write the adapter again") from error
    required = ("peft_type", "r", "lora_alpha", "target_modules")
    missing = [name for name in required if not isinstance(raw, dict) or name not in raw]
    _refuse(file, missing, "fields are missing; write the adapter again")
    for name, values in IMPLEMENTED.items():
        if name in raw and raw[name] not in values:
            raise ValueError(
                f"{file}: {name} is {raw[name]!r}, and only {values[0]!r} is implemented; train or "
                "export the adapter without it"
            )
    if not isinstance(raw["target_modules"], (list, str)):
        raise ValueError(f"{file}: target_modules must be a list, not {raw['target_modules']!r}")
    try:
        config = LoRAConfig(raw["r"], raw["lora_alpha"], raw.get("lora_dropout") or 0.0)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}; r, lora_alpha and lora_dropout set it") from error
    return config, raw["target_modules"]


def _read_tensors(file: Path, rank: int) -> dict[str, Tensor]:
    try:  # as bytes, not as a map of the file: a version's tensors outlive its directory
        found = safetensors.torch.load(file.read_bytes())
    except SafetensorError as error:
        raise ValueError(f"{file}: cut off or no safetensors ({error}); copy it again") from error
    problems = [] if found else ["no tensor in it"]
    for key, tensor in found.items():
        match = KEY.fullmatch(key)
        if match is None:
            problems.append(f"{key} is not {PREFIX}<layer>.lora_A.weight or .lora_B.weight")
            continue
        layer, matrix = match.groups()
        partner = f"{PREFIX}{layer}.lora_{'B' if matrix == 'A' else 'A'}.weight"
        if partner not in found:
            problems.append(f"{key} lacks its partner {partner}")
        if tensor.dim() != 2 or tensor.shape[0 if matrix == "A" else 1] != rank:
            wanted = f"({rank}, in)" if matrix == "A" else f"(out, {rank})"
            problems.append(f"{key} has shape {tuple(tensor.shape)}, rank r asks for {wanted}")
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            problems.append(f"{key} is {tensor.dtype}, not fp32, bf16 or fp16")
        elif not all_finite(tensor):
            problems.append(f"{key} holds NaN or infinity")
    _refuse(file, problems, "not an adapter as PEFT writes it; write it again")
    return {key.removeprefix(PREFIX): tensor.float() for key, tensor in found.items()}


def _refuse(where: Path, problems: list[str], summary: str) -> None:
    if problems:
        more = [f"and {len(problems) - 10} more"] if len(problems) > 10 else []
        raise ValueError("\n  ".join([f"{where}: {summary}", *problems[:10], *more]))


def load_adapter(model: nn.Module, directory: str | Path) -> None:
    """Copies an adapter into the trainable one, in place: an optimizer keeps its parameters.

    Raises ValueError, and changes nothing, unless tensors and parameters are the same set with the
    same shapes and the scaling is equal.
    """
    config, tensors = read_adapter(directory)
    parameters = lora_parameters(model)
    problems = [f"{name} is not in the file" for name in parameters if name not in tensors]
    problems += [f"{name} is not in the model" for name in tensors if name not in parameters]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)}, in the model {tuple(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in tensors and tensors[name].shape != parameter.shape
    ]
    summary = "not this model's adapter; inject_lora with the same rank and target_modules first"
    _refuse(Path(directory), problems, summary)
    _check_config(model, config)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


# --- versions -------------------------------------------------------------------------------------


def publish(
    model: nn.Module, config: LoRAConfig, root: str | Path, version: int, base_model: str = ""
) -> Path:
    """save_adapter as root/v000018, a path that was never used before; returns it in full.

    One process writes to a root. Raises as save_adapter, and FileExistsError if the version is or
    was there: a run that starts anew takes another root, one that goes on the next version.
    """
    path = Path(root).absolute() / f"v{version:06d}"
    if not VERSION.fullmatch(path.name):
        raise ValueError(f"version must be a whole number of at least 0, not {version!r}")
    if path.exists() or _retired(path).exists():
        raise FileExistsError(f"{path}: published before; a path is never used twice")
    return save_adapter(model, config, path, base_model)


def list_published(root: str | Path) -> list[Path]:
    """The complete versions under `root`, oldest first; neither half-written nor retired ones."""
    versions = [path for path in Path(root).iterdir() if VERSION.fullmatch(path.name)]
    return sorted(versions, key=lambda path: int(path.name[1:]))


def retire(path: str | Path) -> None:
    """Deletes a published version, whole at once, when no request can name it any more; a second
    call finishes what a crash broke off."""
    path = Path(path).absolute()
    if not VERSION.fullmatch(path.name):
        raise ValueError(f"{path}: not a published version, which has a name like v000018")
    if path.exists():
        os.rename(path, _retired(path))
    for file in _retired(path).iterdir():
        file.unlink()


def clear(root: str | Path) -> None:
    """Retires all that a writer left under `root` who is dead, the half-written and half-retired
    too. For a root that nobody writes to, when no server can name its versions any more."""
    for half_written in Path(root).glob(".v*.tmp-*"):
        shutil.rmtree(half_written)
    for half_retired in Path(root).glob(".v*.retired"):
        retire(half_retired.with_name(half_retired.stem[1:]))
    for path in list_published(root):
        retire(path)


def _retired(path: Path) -> Path:
    return path.with_name(f".{path.name}.retired")
