"""Checks of an index and a header: every mutation of them is refused, or can be read within what the files hold."""

from __future__ import annotations

import json
import math
import random
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from mpidl.checkpoint import folder, index, json_encoding
from mpidl.checkpoint.index import Index
from mpidl.checkpoint.reading import CheckpointReader
from mpidl.checkpoint.schema import BLOCK
from mpidl.checkpoint.tensorfile import TensorFile, write_file
from mpidl.errors import CheckpointError, ConfigurationError
from tests.mpidl.checkpoint.mutations import DEEP, as_text, mutated, nested

NAME = "rank00000-000.safetensors"


def sample(path: Path) -> dict[str, Any]:
    """A checkpoint of 2 ranks in a directory, with all that an index can hold; the content of its index."""
    whole: dict[str, torch.Tensor] = {}
    extra = {"t": torch.ones(3), "a": torch.arange(4).numpy(), 2: (None, float("inf"), b"x", torch.int8), "s": [1.5]}
    encoded = json_encoding.encode(extra, "extra", whole)
    tensors = {
        "model/w": torch.ones(3, 2),
        "model/b": torch.ones(3),
        "optimizer/exp_avg/w": torch.ones(3, 2),
        "rank00000/model/r": torch.ones(2),
        "rank00001/model/r": torch.zeros(2),
        "gradient/w": torch.ones(3, 2),
        "seen/w": torch.ones(3, 2),
        "remainder/w": torch.ones(3, 2),
        "compression.q.w": torch.ones(2, 1),
        "model/c": torch.ones(4, 2),
        "model/c#1": torch.ones(4, 3),
        **whole,
    }
    runs = {"model/c": [[[0, 4]], [[0, 1], [3, 4]]], "model/c#1": [[[0, 4]], [[1, 3], [4, 5]]]}  # columns of five
    written = write_file(path / NAME, [(name, t.dtype, t.shape, lambda t=t: t) for name, t in tensors.items()])
    about = {
        **{"step": 3, "micro_step": 1, "ranks": 2, "engine": "ddp", "extra": encoded, "scheduler_class": "LambdaLR"},
        "model": {
            **{"class": "Linear", "parameters": ["w", "r", "c"], "buffers": ["b"], "tied": {"v": "w"}},
            "published": {"config.json": '{"model_type": "gpt2"}'},
            "extra_state": {"_extra_state": {"n": 1}},
        },
        "optimizer": {
            **{"class": "AdamW", "steps": 3},
            "groups": [
                {"params": ["w", "r"], "settings": json_encoding.encode({"lr": 0.1, "betas": (0.9, 0.99)}, "", {})}
            ],
            "state": {"w": {"exp_avg": "$slices", "step": json_encoding.encode(torch.tensor(3.0), "", {})}},
        },
        "scheduler": {"last_epoch": 3},
        "compression": {
            **{"method": "powersgd:1", "steps": 3, "in_step": True, "remainders": ["w"]},
            "states": {"w": {"q": {"$tensor": "compression.q.w"}}},
        },
        "own": [{"random": {"python": 1}}, {"hook": {"n": 2}}],
    }
    parts = {}
    for name, t in tensors.items():
        part = {"file": NAME, "key": name, "start": 0, "stop": t.numel(), "crc32": written.blocks[name]}
        if name in runs:
            part["runs"] = runs[name]
        shape = [4, 5] if name in runs else list(t.shape)
        parts.setdefault(name.partition("#")[0], (code(t), shape, []))[2].append(part)
    files = {NAME: {"bytes": written.bytes, "header": written.header}}
    text = index.merge(path, about, [{"files": files, "tensors": parts}]).text()
    (path / index.NAME).write_text(text)
    return dict(json.loads(text))


def code(tensor: torch.Tensor) -> str:
    return {torch.float32: "F32", torch.int64: "I64"}[tensor.dtype]


def encoded(content: Index) -> list[Any]:
    """All values of the index that are encoded."""
    about = content.about
    found = [about.get(key) for key in ("scheduler", "scaler", "sampler", "averager", "extra")]
    found += [value for own in about["own"] for value in own.values()]
    found += about["model"].get("extra_state", {}).values()
    optimizer = about.get("optimizer", {"groups": [], "state": {}})
    found += [group["settings"] for group in optimizer["groups"]]
    return found + [value for entry in optimizer["state"].values() for value in entry.values()]


def read_all(content: Index) -> None:
    """Reads what loading could read."""
    with CheckpointReader(content) as reader:
        for value in encoded(content):
            json_encoding.decode(value, reader.tensor)
        for name in content.tensors:
            reader.tensor(name)


def bounded(content: Index) -> None:
    """Everything together, and each thing once, has room in the files."""
    asked = sum(entry.count * entry.dtype.itemsize for entry in content.tensors.values())
    assert asked <= sum((content.path / name).stat().st_size for name in content.files)
    names = [name for value in encoded(content) for name in json_encoding.names_in(value)]
    assert len(names) == len(set(names))


def test_any_mutation_of_an_index_is_refused_or_can_be_read(tmp_path: Path) -> None:
    content = sample(tmp_path)
    read_all(index.read(tmp_path))
    rng, refused = random.Random(1), 0
    for _ in range(600):
        changed, what = mutated(content, rng)
        try:
            found = index.parse(tmp_path, as_text(changed, index.content_checksum))
            folder.check_files(found)
            bounded(found)
            read_all(found)
        except CheckpointError:
            refused += 1
        except Exception as error:
            pytest.fail(f"{what}: {type(error).__name__}: {error}")
    assert 300 < refused < 590


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * DEEP, "nested too deeply"),
        ('{"a":' * DEEP, "nested too deeply"),
        ("1" * DEEP, "is damaged or cut short"),
        ('{"format": NaN}', "holds NaN, which is no JSON"),
        ("[]", "is not the index of an mpidl checkpoint"),
    ],
)
def test_texts_that_are_no_index_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        index.parse(tmp_path, text)


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        ("extra", nested(900), "extra.*is nested more than 64 deep"),
        ("tensors/model/w/shape", [-3, -2], "tensors.model/w: has the shape"),
        ("tensors/model/w/shape", [1 << 40, 1 << 40], "which no memory holds"),
        ("tensors/model/w/dtype", ["F32"], r"tensors.model/w.dtype: is a list; needs the name of a dtype"),
        ("files", {"a\0b": {"bytes": 3}}, r"files.a\\x00b: is 'a\\x00b'; needs the name of a file"),
        ("model/published", {"../x": "{}"}, "is none of config.json, generation_config.json"),
        ("model/published", {"config.json": {}}, "config.json: is an object; needs a text"),
        ("files", {"../x.safetensors": {"bytes": 3}}, "needs the name of a file"),
        ("model/parameters", ["w", "r", "w"], "names a parameter or buffer twice"),
        ("ranks", 3, "own: has 2 entries; needs one of each of 3 ranks"),
        ("ranks", True, "ranks: is True; needs an integer of at least 1"),
        ("step", None, "step: is None; needs an integer"),
        ("optimizer/state/w/exp_avg", "x", "optimizer.state: lacks exp_avg of w, which is among the tensors"),
        ("optimizer/groups", [{"params": ["q"], "settings": {}}], "has 'q', which is no parameter of the model"),
        ("tensors/model/c/cuts", [], "tensors.model/c: has no cuts"),
        ("tensors/model/c/cuts", [[[[0, 4]], [[0, 5]]]], "model/c: has slices that do not fit together"),
        ("tensors/model/c/cuts", [[[[0, 4]], [[0, 3]]], [[[0, 4]], [[2, 5]]]], "model/c: has cuts that overlap"),
        ("tensors/model/c/cuts", [[[[0, 4]], [[0, 3]]], [[[0, 4]], [[4, 5]]]], "has cuts of 16 of its 20 elements"),
        ("tensors/model/c/cuts", [[[[0, 4]], [[0, 3], [2, 4]]]], "has a cut that has runs of dimension 1 that overlap"),
        (
            "tensors/model/c/cuts",
            [[[[0, 4]], [[0, 6]]]],
            "has a cut that has runs outside the 5 indices of dimension 1",
        ),
        ("tensors/model/c/cuts", [[[[0, 4]], [[2, 2]]]], "has a cut that is empty"),
        ("tensors/model/c/cuts", [[[[0, 4]], [[0, 5, 6]]]], "needs where a run of indices begins and ends"),
        ("tensors/model/c/cuts", [[[[0, 4]], [0, 5]]], "cuts.1.0: is 0; needs where a run of indices begins and ends"),
        ("tensors/model/c/cuts", [[[[0, 4]]]], "has a cut that has runs of 1 dimensions"),
        ("tensors/model/c/shape", [1 << 30, 5], "has cuts of 20 of its 5368709120 elements"),
        ("mesh", {"tp": 2}, "is of a rank beyond 1"),
        ("mesh", {"tp": 3}, "mesh: has 3 points, which do not divide 2 ranks"),
        ("extra", [{"$tensor": "extra/0"}, {"$tensor": "extra/0"}], "which stands in another place too"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, at: str, value: Any, said: str) -> None:
    content = sample(tmp_path)
    *path, last = re.sub(r"model/([cw])/", r"model#\1/", at).split("/")
    inner = content
    for key in path:
        inner = inner[key.replace("#", "/")]
    inner[last] = value
    with pytest.raises(CheckpointError, match=said):
        index.parse(tmp_path, as_text(content, index.content_checksum))


def test_one_piece_is_one_slice_and_no_more_fits_in_a_file_than_it_has(tmp_path: Path) -> None:
    content = sample(tmp_path)
    entry = content["tensors"]["extra/0"]
    piece = entry["slices"][0]
    pieces = [{**piece, "start": 3 * n, "stop": 3 * n + 3} for n in range(20_000)]
    content["tensors"]["extra/0"] = {**entry, "shape": [60_000], "slices": pieces}
    with pytest.raises(CheckpointError, match=r"extra/0: has 'extra/0' of .*, which another slice is"):
        index.parse(tmp_path, as_text(content, index.content_checksum))
    pieces = [{**part, "key": f"{n}"} for n, part in enumerate(pieces)]
    content["tensors"]["extra/0"]["slices"] = pieces
    with pytest.raises(CheckpointError, match=r"has \d+ bytes and the slices in it 240"):
        index.parse(tmp_path, as_text(content, index.content_checksum))


def test_cuts_that_ask_for_much_memory_are_refused(tmp_path: Path) -> None:
    content = sample(tmp_path)
    entry = content["tensors"]["model/c"]
    side = 1 << 13
    runs = [[n, n + 1] for n in range(0, side, 2)]
    entry["shape"] = [side, side]
    entry["cuts"] = [[runs, [[0, side]]], [[[1, 2]], runs]]
    with pytest.raises(CheckpointError, match="model/c: is cut into more than 16777216 pieces"):
        index.parse(tmp_path, as_text(content, index.content_checksum))


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(path: Path, text: str, data: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data)


def test_any_mutation_of_a_header_is_refused_or_bounded_by_the_file(tmp_path: Path) -> None:
    sample(tmp_path)
    header, data = header_of(tmp_path / NAME)
    rng, refused = random.Random(2), 0
    for number in range(300):
        changed, what = mutated(header, rng)
        path = tmp_path / f"{number}.safetensors"
        write_header(path, json.dumps(changed), data)
        try:
            with TensorFile(path) as file:
                held = sum(span.dtype.itemsize * math.prod(span.shape) for span in file.spans.values())
                assert held <= len(data)
        except CheckpointError:
            refused += 1
        except Exception as error:
            pytest.fail(f"{what}: {type(error).__name__}: {error}")
    assert refused > 100


@pytest.mark.parametrize(
    "text", ["[" * DEEP, "{}" * 2, "[]", '{"a": {"dtype": "F32", "shape": [], "data_offsets": 3}}']
)
def test_headers_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / NAME
    write_header(path, text, b"")
    with pytest.raises(CheckpointError, match=f"{NAME}: is no safetensors file: its header cannot be read"):
        TensorFile(path)


def test_many_tensors_of_a_header_are_not_the_same_bytes(tmp_path: Path) -> None:
    entry = {"dtype": "U8", "shape": [100], "data_offsets": [0, 100]}
    write_header(tmp_path / NAME, json.dumps({f"{n}": entry for n in range(20_000)}), b"x" * 100)
    with pytest.raises(CheckpointError, match="lies in another tensor"):
        TensorFile(tmp_path / NAME)


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    content = index.Index(tmp_path, {}, {}, {})
    with pytest.raises(CheckpointError, match=r"index.json: cannot be written as the format has it: lacks step"):
        content.text()
    with pytest.raises(ConfigurationError, match="extra: is nested too deeply"):
        json_encoding.encode(nested(65), "extra", {})
    depth = json_encoding.encode((((nested(57), {3: 4}),),), "extra", {})
    assert json_encoding.decode(json.loads(json.dumps(depth)), lambda name: None) == (((nested(57), {3: 4}),),)


def test_a_large_tensor_has_a_checksum_for_each_of_its_blocks(tmp_path: Path) -> None:
    content = sample(tmp_path)
    content["files"][NAME]["bytes"] = 1 << 40
    count = 2 * BLOCK // 4 + 1
    piece = {**content["tensors"]["extra/0"]["slices"][0], "stop": count}
    content["tensors"]["extra/0"] = {"dtype": "F32", "shape": [count], "slices": [piece]}
    for sums, fits in ((2, False), (3, True), (4, False)):
        piece["crc32"] = ["00000000"] * sums
        text = as_text(content, index.content_checksum)
        if fits:
            assert index.parse(tmp_path, text).tensors["extra/0"].count == count
        else:
            with pytest.raises(CheckpointError, match="has slices that do not fit together"):
                index.parse(tmp_path, text)
