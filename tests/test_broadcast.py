"""broadcast.py: what was written is read, what is damaged is refused, nothing is half there."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import (
    lora_configs,
    randomise_adapter,
    seeds,
    tiny_config,
    tiny_configs,
    tiny_model,
    tiny_tokens,
)

import broadcast
from broadcast import (
    clear,
    list_published,
    load_adapter,
    publish,
    read_adapter,
    retire,
    save_adapter,
)
from lora import LoRAConfig, add_adapter, inject_lora, lora_parameters, use_adapters

pytestmark = pytest.mark.filterwarnings("ignore:rank .* is larger")

LORA = LoRAConfig(rank=2, alpha=8.0, target_modules=("q_proj", "down_proj"))
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def fsync_calls(monkeypatch) -> list[str]:
    """Records what is fsynced, and does not wait for the disk."""
    calls = []
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(os.readlink(f"/proc/self/fd/{fd}")))
    return calls


def adapted(config=None, lora=LORA, seed=0):
    model = tiny_model(config, seed)
    inject_lora(model, lora)
    randomise_adapter(model, seed)
    return model


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


def same(model, tensors) -> bool:
    parameters = lora_parameters(model)
    return parameters.keys() == tensors.keys() and all(
        torch.equal(parameters[name], tensor) for name, tensor in tensors.items()
    )


# --- there and back -------------------------------------------------------------------------------


@given(config=tiny_configs(), lora=lora_configs(), seed=seeds)
def test_save_load_save_is_byte_equal(tmp_path_factory, config, lora, seed):
    root = tmp_path_factory.mktemp("adapter")
    model = adapted(config, lora, seed)
    first = save_adapter(model, lora, root / "first", base_model="owner/name")
    read, tensors = read_adapter(first)
    assert (read.rank, read.alpha, read.dropout) == (lora.rank, lora.alpha, lora.dropout)
    assert read.target_modules == lora.target_modules
    assert same(model, tensors)
    other = tiny_model(config, seed)
    inject_lora(other, read)
    load_adapter(other, first)
    second = save_adapter(other, read, root / "second", base_model="owner/name")
    assert contents(first) == contents(second)
    assert list(contents(first)) == ["adapter_config.json", "adapter_model.safetensors"]


@given(config=tiny_configs(), lora=lora_configs(), seed=seeds)
def test_the_directory_samples_what_the_trainer_computes(tmp_path_factory, config, lora, seed):
    """The embedded engine's way: read_adapter, add_adapter, use_adapters; the same bits."""
    trainer, ids = adapted(config, lora, seed), tiny_tokens(config, 2, 6, seed)
    directory = save_adapter(trainer, lora, tmp_path_factory.mktemp("adapter"))
    sampler = tiny_model(config, seed)
    base = sampler(ids)
    add_adapter(sampler, "v0", *read_adapter(directory))
    with use_adapters(sampler, [("v0", None)]):
        assert torch.equal(sampler(ids), trainer(ids))
        assert not torch.equal(sampler(ids), base)


def test_the_files_are_as_peft_writes_them(tmp_path):
    directory = save_adapter(adapted(), LORA, tmp_path / "adapter", base_model="owner/name")
    with safetensors.safe_open(directory / "adapter_model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    layers = [f"base_model.model.model.layers.{i}" for i in range(2)]
    targets = [f"{at}.{name}" for at in layers for name in ("self_attn.q_proj", "mlp.down_proj")]
    assert set(tensors) == {f"{t}.lora_{matrix}.weight" for t in targets for matrix in "AB"}
    assert all(t.dtype == torch.float32 for t in tensors.values())
    settings = json.loads((directory / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 8}
    expected |= {"base_model_name_or_path": "owner/name", "bias": "none", "lora_dropout": 0.0}
    assert expected.items() <= settings.items()
    assert settings["target_modules"] == ["down_proj", "q_proj"]


def test_target_modules_are_those_that_were_adapted(tmp_path):
    lora = LoRAConfig(rank=2)  # the default names "experts" too, which a dense model lacks
    directory = save_adapter(adapted(lora=lora), lora, tmp_path / "adapter")
    settings = json.loads((directory / "adapter_config.json").read_text())
    assert len(settings["target_modules"]) == 7 and "experts" not in settings["target_modules"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_adapters_are_read_as_fp32(tmp_path, dtype):
    directory = save_adapter(adapted(), LORA, tmp_path / "adapter")
    file = directory / "adapter_model.safetensors"
    narrow = {key: t.to(dtype) for key, t in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(narrow, file)
    _, tensors = read_adapter(directory)
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, narrow[f"base_model.model.{name}"].float())


# --- what is refused to be written ----------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_adapter_is_never_written(tmp_path, value):
    model = adapted()
    name = "model.layers.1.mlp.down_proj.lora_B.weight"
    lora_parameters(model)[name].data[3, 1] = value
    with pytest.raises(ValueError, match=f"{name} holds NaN or infinity"):
        publish(model, LORA, tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_is_never_written_over(tmp_path):
    directory = save_adapter(adapted(), LORA, tmp_path / "adapter")
    before = contents(directory)
    with pytest.raises(FileExistsError, match=str(directory)):
        save_adapter(adapted(seed=1), LORA, directory)
    assert contents(directory) == before


def test_the_config_must_be_the_adapters(tmp_path):
    for other in (LoRAConfig(rank=4, alpha=16.0), LoRAConfig(rank=2, alpha=16.0)):
        with pytest.raises(ValueError, match="rank and scaling"):
            save_adapter(adapted(), other, tmp_path / "adapter")
    with pytest.raises(ValueError, match="no trainable adapter"):
        save_adapter(tiny_model(), LORA, tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


# --- what is refused to be read -------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path):
    return save_adapter(adapted(), LORA, tmp_path / "adapter")


def edit_config(directory, **changes):
    file = directory / "adapter_config.json"
    settings = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in settings.items() if v != "absent"}))


def edit_tensors(directory, **changes):
    """Replaces tensors of layer 0's q_proj (names with _ for .), or drops them where None."""
    file = directory / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for name, tensor in changes.items():
        key = f"{Q_PROJ}.{name}.weight"
        tensors.pop(key)
        if tensor is not None:
            tensors[key] = tensor
    safetensors.torch.save_file(tensors, file)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"r": "absent"}, "missing.*\n.*r"),
        ({"lora_alpha": "absent"}, "missing.*\n.*lora_alpha"),
        ({"peft_type": "absent"}, "missing.*\n.*peft_type"),
        ({"target_modules": "absent"}, "missing.*\n.*target_modules"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"use_rslora": True}, "use_rslora is True"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern is"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        (
            {"r": 4, "lora_alpha": 16},
            r"q_proj.lora_A.weight has shape \(2, 12\), rank r asks for \(4",
        ),
        ({"r": 0}, "rank must be"),
        ({"r": "2"}, "rank must be"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"lora_alpha": -8}, "alpha must be"),
        ({"lora_dropout": 1.5}, "dropout must be"),
        ({"target_modules": ["q_proj"]}, "model.layers.0.mlp.down_proj is adapted too"),
        ({"target_modules": ["q_proj", "down_proj", "k_proj"]}, "no tensor adapts k_proj"),
        ({"target_modules": r".*\.q_proj"}, "model.layers.0.mlp.down_proj does not match"),
        ({"target_modules": None}, "target_modules must be a list"),
    ],
)
def test_a_config_that_is_wrong_or_not_implemented_is_refused_by_name(directory, changes, named):
    edit_config(directory, **changes)
    with pytest.raises(ValueError, match=named) as error:
        read_adapter(directory)
    assert str(directory) in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": [], "use_dora": None},
        {"target_modules": ["self_attn.q_proj", "mlp.down_proj"]},
        {"target_modules": r"model\.layers\.\d+\.(self_attn|mlp)\.(q|down)_proj"},
        {"lora_dropout": "absent", "init_lora_weights": "gaussian", "unheard_of": 1},
    ],
)
def test_other_ways_to_say_the_same_are_read(directory, changes):
    expected = read_adapter(directory)
    edit_config(directory, **changes)
    config, tensors = read_adapter(directory)
    assert config == expected[0] and tensors.keys() == expected[1].keys()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lora_B": None}, "q_proj.lora_A.weight lacks its partner .*q_proj.lora_B.weight"),
        ({"lora_A": None}, "q_proj.lora_B.weight lacks its partner .*q_proj.lora_A.weight"),
        ({"lora_A": torch.zeros(3, 12)}, r"lora_A.weight has shape \(3, 12\)"),
        ({"lora_B": torch.zeros(24, 3)}, r"lora_B.weight has shape \(24, 3\)"),
        ({"lora_A": torch.zeros(2)}, r"lora_A.weight has shape \(2,\)"),
        ({"lora_A": torch.full((2, 12), float("nan"))}, "lora_A.weight holds NaN"),
        ({"lora_B": torch.full((24, 2), float("inf"))}, "lora_B.weight holds NaN or infinity"),
        ({"lora_A": torch.zeros(2, 12, dtype=torch.int8)}, "lora_A.weight is torch.int8"),
        ({"lora_A": torch.zeros(2, 12, dtype=torch.float64)}, "lora_A.weight is torch.float64"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(directory, changes, named):
    edit_tensors(directory, **changes)
    with pytest.raises(ValueError, match=named) as error:
        read_adapter(directory)
    assert str(directory / "adapter_model.safetensors") in str(error.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model.model.", ""),
        ("base_model.model.", "foreign."),
        ("lora_A.weight", "lora_A.default.weight"),
        ("lora_A.weight", "lora_magnitude_vector"),
        ("lora_A.weight", "lora_embedding_A"),
    ],
)
def test_foreign_names_are_refused(directory, old, new):
    file = directory / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file({k.replace(old, new): t for k, t in tensors.items()}, file)
    with pytest.raises(ValueError, match="is not base_model.model.<layer>.lora_A.weight") as error:
        read_adapter(directory)
    assert str(file) in str(error.value)


@given(data=st.data())
def test_a_file_cut_off_anywhere_is_refused(tmp_path_factory, data):
    directory = save_adapter(adapted(), LORA, tmp_path_factory.mktemp("adapter"))
    name = data.draw(st.sampled_from(["adapter_config.json", "adapter_model.safetensors"]))
    file = directory / name
    whole = file.read_bytes()
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 3))])
    with pytest.raises(ValueError, match=name):
        read_adapter(directory)


def test_missing_files_and_broken_json_are_refused_by_name(directory, tmp_path):
    with pytest.raises(ValueError, match="nowhere/adapter_config.json: no such file"):
        read_adapter(tmp_path / "nowhere")
    (directory / "adapter_config.json").write_text("[]")
    with pytest.raises(ValueError, match="fields are missing"):
        read_adapter(directory)
    (directory / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="adapter_config.json: not valid JSON"):
        read_adapter(directory)
    (directory / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="adapter_model.safetensors: no such file"):
        read_adapter(directory)


@pytest.mark.parametrize(
    ("config", "lora", "named"),
    [
        ({}, {"target_modules": ("q_proj",)}, "down_proj.lora_A.weight is not in the model"),
        ({}, {"target_modules": ("q_proj", "k_proj", "down_proj")}, "k_proj.*is not in the file"),
        ({}, {"rank": 3}, r"has shape \(2, 12\), in the model \(3, 12\)"),
        ({}, {"alpha": 16.0}, r"rank and scaling .* \(2, 8.0\) in the model, but \(2, 4.0\)"),
        ({"hidden_size": 16}, {}, r"has shape \(2, 12\), in the model \(2, 16\)"),
        ({"num_hidden_layers": 1}, {}, "model.layers.1.*is not in the model"),
    ],
)
def test_an_adapter_of_another_model_is_refused_and_nothing_changed(directory, config, lora, named):
    settings = {"rank": 2, "alpha": 8.0, "target_modules": LORA.target_modules} | lora
    model = adapted(tiny_config(**config), LoRAConfig(**settings), seed=3)
    before = {name: p.detach().clone() for name, p in lora_parameters(model).items()}
    with pytest.raises(ValueError, match=named):
        load_adapter(model, directory)
    assert same(model, before)


def test_loading_keeps_the_parameters_that_an_optimizer_holds(directory):
    model = adapted(seed=3)
    held = lora_parameters(model)
    load_adapter(model, directory)
    for name, parameter in lora_parameters(model).items():
        assert parameter is held[name] and parameter.requires_grad
    assert same(model, read_adapter(directory)[1])


# --- versions -------------------------------------------------------------------------------------


def test_versions_are_published_listed_and_retired(tmp_path):
    root = tmp_path / "run" / "broadcasts"
    models = [adapted(seed=i) for i in range(3)]
    paths = [publish(models[i], LORA, root, version) for i, version in enumerate([0, 9, 1_000_000])]
    assert paths == [root / "v000000", root / "v000009", root / "v1000000"]
    assert list_published(root) == paths
    assert all(
        same(model, read_adapter(path)[1]) for model, path in zip(models, paths, strict=True)
    )
    retire(paths[1])
    assert list_published(root) == [paths[0], paths[2]]
    assert not any(file.suffix == ".safetensors" for file in root.glob("*9*/*"))
    retire(paths[1])  # twice is once
    with pytest.raises(ValueError, match="not a published version"):
        retire(root)
    with pytest.raises(FileNotFoundError):
        retire(root / "v000005")


def test_a_version_is_published_once_even_after_it_is_retired(tmp_path):
    path = publish(adapted(), LORA, tmp_path, 7)
    before = contents(path)
    for _ in range(2):
        with pytest.raises(FileExistsError, match="v000007: published before"):
            publish(adapted(seed=1), LORA, tmp_path, 7)
    assert contents(path) == before
    retire(path)
    with pytest.raises(FileExistsError, match="v000007: published before"):
        publish(adapted(seed=1), LORA, tmp_path, 7)
    assert list_published(tmp_path) == []
    with pytest.raises(ValueError, match="version must be"):
        publish(adapted(), LORA, tmp_path, -1)


def test_a_full_disk_is_an_error_with_the_path_and_leaves_nothing(tmp_path, monkeypatch):
    old = publish(adapted(), LORA, tmp_path, 0)
    write = Path.write_bytes

    def write_half(path, data):
        write(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(OSError, match="No space left on device.*v000001") as error:
        publish(adapted(), LORA, tmp_path, 1)
    assert error.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == [old]
    monkeypatch.undo()  # room was made: the version was never seen, so it may be published
    assert publish(adapted(), LORA, tmp_path, 1) == tmp_path / "v000001"


def test_what_does_not_read_back_as_it_was_written_is_not_published(tmp_path, monkeypatch):
    """A medium that loses bits: the file is whole and its numbers are finite, but other ones."""
    write = Path.write_bytes
    flipped = lambda path, data: write(path, data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])  # noqa: E731
    monkeypatch.setattr(Path, "write_bytes", flipped)
    with pytest.raises(ValueError, match="reads back other than it was written"):
        publish(adapted(), LORA, tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_writer_left_is_cleared_and_what_a_living_one_writes_is_left_alone(tmp_path):
    """By who takes its place: publishing into a root touches nothing of another writer."""
    whole, retired = (publish(adapted(), LORA, tmp_path, version) for version in (0, 1))
    half_written = tmp_path / ".v000003.tmp-4711"
    half_retired = tmp_path / ".v000001.retired"
    half_written.mkdir()
    (half_written / "adapter_model.safetensors").write_bytes(b"half")
    retired.rename(half_retired)  # and then killed, before it was emptied
    assert list_published(tmp_path) == [whole]
    fourth = publish(adapted(), LORA, tmp_path, 4)
    assert contents(half_written) and contents(half_retired)
    for _ in range(2):  # twice is once
        clear(tmp_path)
        left = {".v000000.retired", ".v000001.retired", ".v000004.retired"}
        assert {path.name for path in tmp_path.iterdir()} == left
        assert not any(contents(path) for path in tmp_path.iterdir())
    for version in (0, 1, 4):
        with pytest.raises(FileExistsError, match="published before"):
            publish(adapted(), LORA, tmp_path, version)
    assert publish(adapted(), LORA, tmp_path, 3).is_dir() and not fourth.exists()


def test_all_bytes_are_on_the_disk_before_the_name_is_and_the_name_before_the_return(
    tmp_path, monkeypatch, fsync_calls
):
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda *a: fsync_calls.append("rename") or rename(*a))
    publish(adapted(), LORA, tmp_path, 3)
    temporary = str(tmp_path / f".v000003.tmp-{os.getpid()}")
    files = {f"{temporary}/adapter_config.json", f"{temporary}/adapter_model.safetensors"}
    assert set(fsync_calls[:2]) == files
    assert fsync_calls[2:] == [temporary, "rename", str(tmp_path)]


def kill_writers(root: Path) -> None:
    """Run in a process of its own: one writer for each line of publishing, killed before it.

    Prints how many of them left the old version, and how many the new one too.
    """
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # a killed process loses nothing that it wrote
    config, lora = tiny_config(num_hidden_layers=1), LoRAConfig(rank=2, target_modules=("q_proj",))
    old, new = adapted(config, lora, seed=0), adapted(config, lora, seed=1)

    def die_at(wanted: int):
        count = 0

        def trace(frame, event, argument):
            nonlocal count
            code = frame.f_code
            if code.co_filename != broadcast.__file__ or code.co_name.startswith("_read"):
                return None  # what only reads leaves the directory as its caller does
            count += event == "line"
            if count == wanted:
                os._exit(9)
            return trace

        return trace

    outcomes, died = [], True
    while died:
        place = root / str(len(outcomes))
        publish(old, lora, place, 0)
        writer = os.fork()
        if writer == 0:
            sys.settrace(die_at(len(outcomes) + 1))
            publish(new, lora, place, 1)
            os._exit(0)
        died = os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) != 0
        published = list_published(place)
        for path, trained in zip(published, (old, new)[: len(published)], strict=True):
            assert same(trained, read_adapter(path)[1]), path
        outcomes.append(len(published))
        clear(place)  # as who comes next does
        assert {path.name for path in place.iterdir()} == {f".{p.name}.retired" for p in published}
        assert not [file for path in place.iterdir() for file in path.iterdir()]
    assert outcomes == sorted(outcomes) and set(outcomes) == {1, 2}
    print(outcomes.count(1), outcomes.count(2))


def test_killed_at_any_moment_of_publishing_a_reader_sees_the_old_version_or_the_new(tmp_path):
    code = "import sys, pathlib, test_broadcast as t; t.kill_writers(pathlib.Path(sys.argv[1]))"
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.returncode == 0, result.stderr
    before, after = map(int, result.stdout.split())
    assert before > 30 and after > 3  # deaths before the rename, and after it
