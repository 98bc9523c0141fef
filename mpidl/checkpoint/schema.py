"""Checks of an index and of a file's header: types, ranges, names, depths, and sizes that must fit each other.

    text --json--> content --check--> valid content: all that is read by it lies inside the files

What is saved is checked too, so that nothing is written that cannot be read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from ..mesh.layout import MODEL_AXES
from ..mesh.placement import Cut
from ..models.published import FILES
from ..weight_files import FILE_NAME
from . import cuts, json_encoding
from .json_checks import (
    SIZES,
    any_list,
    boolean,
    bytes_of,
    document,
    dtype_code,
    integer_check,
    items,
    mapping,
    nullable,
    one_of,
    record,
    text,
    text_of_form,
)
from .json_encoding import Malformed, check_at, shown, within

BLOCK = 4 << 20  # bytes that have a checksum of their own
LONGEST_INDEX = 256 << 20  # bytes
_OF_RANK = re.compile(r"rank(\d{5,})/((?:model|optimizer)/.*)", re.DOTALL)
_STATE = re.compile(r"(?:rank\d{5,}/)?optimizer/([^/]*)/(.*)", re.DOTALL)
_WITHOUT_NUMPY = ("BF16", "F8_E4M3", "F8_E5M2")
SLICES = "$slices"  # in place of a state of the optimizer that has the parameter's shape

file_name = text_of_form(FILE_NAME, "a file, such as rank00000-000.safetensors")
_PART = re.compile(rf"part(-({'|'.join(MODEL_AXES)})\d{{1,9}}){{1,{len(MODEL_AXES)}}}", re.ASCII)
_part_name = text_of_form(_PART, "a part, such as part-pp0-tp1")


def _one_sum(value: Any) -> None:
    sums([value])


def sums(value: Any) -> None:
    """Checks a list of CRC-32 sums of blocks, of 8 digits each."""
    if type(value) is not list or not all(type(one) is str and len(one) == 8 for one in value):
        raise Malformed(f"is {shown(value)}; needs checksums of 8 digits")


# ---- the index ---------------------------------------------------------------------------------------------

_PIECE = {"file": file_name, "key": text, "start": integer_check(), "stop": integer_check(), "crc32": sums}
_SLICE = record(_PIECE, {"cut": integer_check()}, exact=True)
_TENSORS = mapping(
    record({"dtype": dtype_code, "shape": any_list, "slices": items(_SLICE)}, {"cuts": items(any_list)}, exact=True)
)
_FILES = mapping(record({"bytes": integer_check()}, {"header": nullable(text)}), file_name)


def check_index(content: Any) -> None:
    """Raises Malformed unless the content of an index is valid."""
    names: dict[str, bool] = {}  # of tensors in other values; whether they must be such as numpy has

    def encoded(value: Any) -> None:
        json_encoding.check(value, names)

    def settings(value: Any) -> None:
        encoded(value)
        if type(value) is not dict or (json_encoding.tag_of(value) not in (None, "$dict")):
            raise Malformed(f"is {shown(value)}; needs an object")

    each = mapping(encoded)
    group = record({"params": items(text), "settings": settings})
    model = record(
        {"class": text, "parameters": items(text), "buffers": items(text), "tied": mapping(text)},
        {"extra_state": each, "published": mapping(document, one_of(FILES))},
    )
    optimizer = record({"class": text, "groups": items(group), "state": mapping(each)}, {"steps": integer_check()})
    own = record({}, {"random": encoded, "hook": encoded, "states": mapping(each), "unreduced": boolean}, exact=True)
    compression = record(
        {"method": text, "steps": integer_check(), "remainders": items(text), "states": mapping(each)},
        {"in_step": boolean},
    )
    record(
        {
            "step": integer_check(),
            "micro_step": integer_check(),
            "ranks": integer_check(1),
            "engine": text,
            "model": model,
            "extra": encoded,
            "own": items(own),
            "files": _FILES,
            "tensors": _TENSORS,
        },
        {
            "number": integer_check(),
            "mesh": mapping(integer_check(2), one_of(MODEL_AXES)),
            "parts": mapping(_one_sum, _part_name),
            "apart": text,
            "optimizer": optimizer,
            "compression": compression,
            "scheduler_class": text,
            **dict.fromkeys(("scheduler", "scaler", "sampler", "averager"), encoded),
        },
    )(content)
    points = math.prod(content.get("mesh", {}).values())
    if "parts" in content and ("mesh" not in content or points != len(content["parts"])):
        raise Malformed("parts: are not one for each point of mesh")
    if content["ranks"] % points:
        raise Malformed(f"mesh: has {points} points, which do not divide {content['ranks']} ranks")
    _check_slices(content["tensors"], content["files"])
    _check_names(content, names)


def _check_slices(tensors: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Checks that slices cover their tensor, that no two are one piece of a file, and that pieces fit in their file."""
    filled = dict.fromkeys(files, 0)
    taken: set[tuple[str, str]] = set()
    known: dict[str, list[int]] = {}  # the optimizer's states have the cuts of their parameter
    for name, entry in tensors.items():
        try:
            itemsize, size = SIZES[entry["dtype"]], bytes_of(entry["dtype"], entry["shape"])
            counts = [size // itemsize]
            if "cuts" in entry:
                said = repr((entry["shape"], entry["cuts"]))
                counts = known[said] = known.get(said) or _counts(entry)
            number, at = 0, 0
            for part in entry["slices"]:
                start, stop, file, key = part["start"], part["stop"], part["file"], part["key"]
                piece = (stop - start) * itemsize
                if at == counts[number] and part.get("cut", number) == number + 1 < len(counts):
                    number, at = number + 1, 0
                fits = start == at <= stop and part.get("cut") == (number if "cuts" in entry else None)
                if not fits or file not in filled or len(part["crc32"]) != -(-piece // BLOCK):
                    raise Malformed("has slices that do not fit together")
                if (file, key) in taken:
                    raise Malformed(f"has {shown(key)} of {file}, which another slice is")
                taken.add((file, key))
                filled[file] += piece
                at = stop
            if at != counts[number] or number != len(counts) - 1:
                raise Malformed(f"has {sum(counts[:number]) + at} of its {size // itemsize} elements")
        except Malformed as error:
            raise within("tensors", within(name, error)) from None
    for file, size in filled.items():
        if size > files[file]["bytes"]:
            raise Malformed(f"files: {file} has {files[file]['bytes']} bytes and the slices in it {size}")


def _counts(entry: Mapping[str, Any]) -> list[int]:
    """Checks that the cuts of a tensor cover it once, and returns the elements of each."""
    shape = tuple(entry["shape"])
    found = []
    for runs in entry["cuts"]:
        check_at("cuts", items(items(_run)), runs)
        cut = Cut(shape, tuple(tuple((start, stop) for start, stop in of_dim) for of_dim in runs))
        problem = cuts.problem_of(cut)
        if problem or not cuts.element_count(cut):
            raise Malformed(f"has a cut that {problem or 'is empty'}")
        found.append(cut)
    problem = cuts.coverage_problem(shape, found) if found else "has no cuts"
    if problem:
        raise Malformed(problem)
    return [cuts.element_count(cut) for cut in found]


def _run(value: Any) -> None:
    if type(value) is not list or len(value) != 2 or any(type(end) is not int for end in value):
        raise Malformed(f"is {shown(value)}; needs where a run of indices begins and ends")


def _check_names(content: Mapping[str, Any], names: Mapping[str, bool]) -> None:
    """Checks that named tensors exist, and that the ranks' own values of a tensor have one shape and dtype."""
    tensors, model, ranks = content["tensors"], content["model"], content["ranks"]
    replicas = ranks if "parts" in content else ranks // math.prod(content.get("mesh", {}).values())
    if len(content["own"]) != ranks:
        raise Malformed(f"own: has {len(content['own'])} entries; needs one of each of {ranks} ranks")
    for name, for_numpy in names.items():
        if name not in tensors:
            raise Malformed(f"tensors: lacks {shown(name)}")
        if for_numpy and tensors[name]["dtype"] in _WITHOUT_NUMPY:
            raise Malformed(f"tensors: {name} is {tensors[name]['dtype']}, which no array can be")
    of_ranks: dict[str, list[Any]] = {}
    for name, entry in tensors.items():
        found = _OF_RANK.fullmatch(name)
        if found:
            if int(found[1]) >= replicas:
                raise Malformed(f"tensors: {shown(name)} is of a rank beyond {replicas}")
            of_ranks.setdefault(found[2], []).append((entry["dtype"], entry["shape"]))
    for name, entries in of_ranks.items():
        if len(entries) != replicas or any(entry != entries[0] for entry in entries):
            raise Malformed(f"tensors: {shown(name)} is not there for every rank, with one shape and dtype")
    own = {*model["parameters"], *model["buffers"]}
    if len(own) != len(model["parameters"]) + len(model["buffers"]):
        raise Malformed("model: names a parameter or buffer twice")
    for name in own:
        if f"model/{name}" not in tensors and f"model/{name}" not in of_ranks:
            raise Malformed(f"tensors: lacks model/{name}")
    if "compression" in content:
        _check_compression(content["compression"], {*model["parameters"]}, tensors)
    if "optimizer" in content:
        _check_optimizer(content["optimizer"], {*model["parameters"]}, tensors, of_ranks)


def _check_compression(kept: Mapping[str, Any], parameters: set[str], tensors: Mapping[str, Any]) -> None:
    for name in [*kept["remainders"], *kept["states"]]:
        if name not in parameters:
            raise Malformed(f"compression: has {shown(name)}, which is no parameter of the model")
    for name in kept["remainders"]:
        if tensors.get(f"remainder/{name}", {}).get("dtype") != "F32":
            raise Malformed(f"tensors: lacks remainder/{name}, of F32")
    for name, states in kept["states"].items():
        for key, value in states.items():
            if json_encoding.tag_of(value) not in ("$tensor", "$scalar"):
                raise Malformed(f"compression.states.{name}.{key}: is {shown(value)}; needs a tensor")
    expected = {f"remainder/{name}" for name in kept["remainders"]}
    for name in tensors:
        if name.startswith("remainder/") and name not in expected:
            raise Malformed(f"compression.remainders: lack {shown(name)}, which is among the tensors")


def _check_optimizer(
    optimizer: Mapping[str, Any], parameters: set[str], tensors: Mapping[str, Any], of_ranks: Mapping[str, Any]
) -> None:
    grouped = [name for group in optimizer["groups"] for name in group["params"]]
    for name in [*grouped, *optimizer["state"]]:
        if name not in parameters:
            raise Malformed(f"optimizer: has {shown(name)}, which is no parameter of the model")
    if len(grouped) != len({*grouped}):
        raise Malformed("optimizer.groups: have a parameter twice")
    for number, group in enumerate(optimizer["groups"]):
        if "params" in group["settings"]:
            raise Malformed(f"optimizer.groups.{number}.settings: have params")
    states = {
        f"optimizer/{key}/{name}"
        for name, entry in optimizer["state"].items()
        for key, value in entry.items()
        if value == SLICES
    }
    for name in states:
        if name not in tensors and name not in of_ranks:
            raise Malformed(f"tensors: lacks {name}")
    for name in tensors:
        found = _STATE.fullmatch(name)
        if found and f"optimizer/{found[1]}/{found[2]}" not in states:
            raise Malformed(f"optimizer.state: lacks {found[1]} of {found[2]}, which is among the tensors")


# ---- the header of a file ----------------------------------------------------------------------------------

_PLACE = record({"dtype": dtype_code, "shape": any_list, "data_offsets": any_list})
_HEADER = mapping(_PLACE)
_METADATA = mapping(lambda value: None)


def check_header(content: Any) -> None:
    """Raises Malformed unless a header is valid and its tensors do not overlap."""
    if type(content) is not dict:
        raise Malformed(f"is {shown(content)}; needs an object")
    _METADATA(content.get("__metadata__", {}))
    tensors = {name: entry for name, entry in content.items() if name != "__metadata__"}
    _HEADER(tensors)
    ranges = []
    for name, entry in tensors.items():
        offsets = entry["data_offsets"]
        try:
            if len(offsets) != 2 or any(type(offset) is not int or offset < 0 for offset in offsets):
                raise Malformed(f"lies at {shown(offsets)}; needs where it begins and ends")
            if offsets[1] - offsets[0] != bytes_of(entry["dtype"], entry["shape"]):
                raise Malformed(f"lies at {shown(offsets)}, which its shape does not fill")
        except Malformed as error:
            raise within(name, error) from None
        if offsets[0] < offsets[1]:
            ranges.append((offsets[0], offsets[1], name))
    ranges.sort()
    for (_, end, _), (begin, _, name) in pairwise(ranges):
        if begin < end:
            raise Malformed(f"{name} lies in another tensor")
