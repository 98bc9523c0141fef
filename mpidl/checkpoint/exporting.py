"""Exports a model's or a checkpoint's weights to safetensors files.

    files      model-00001-of-00002.safetensors [ header | wte ......... | wpe .. ]     laid out beforehand by rank 0
    rank 0     writes                                      ####              ##         at their places, so that no
    rank 1     writes                                          #####           #        rank holds more than its own

The files are those of Hugging Face's transformers; its index names the file of each tensor where there are several.
Runs of a cut weight are written one by one to where they lie in the whole.

Who runs what: `_create` and `_finish` run on rank 0, `_write` on every rank, each inside `on_rank_0` or
`run_everywhere`, so a rank that fails makes all raise; files that are not finished are then removed by rank 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from collectives import Communicator

from ..errors import CheckpointError, ConfigurationError
from ..job.agreement import on_rank_0, run_everywhere
from ..job.ending import TEMP_PATHS
from ..mesh import Mesh
from ..models.published import CONFIG, FILES, GENERATION, published_files, same_model, with_dtype
from ..regular_files import read_regular
from ..weight_files import INDEX, SINGLE
from . import cuts, folder, index
from .engine import engine_of
from .held_tensor import Share
from .index import TensorEntry
from .json_checks import mapping
from .parts import refuse_parts
from .reading import CheckpointReader
from .saving import wait
from .schema import BLOCK, LONGEST_INDEX
from .tensorfile import TensorFile, TensorSpan, as_bytes, checksum, header_of, naming_path, write_all

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True)
class _File:
    name: str
    first: bytes
    spans: dict[str, TensorSpan]

    @property
    def bytes(self) -> int:
        return max((span.end for span in self.spans.values()), default=len(self.first))


def byte_count(size: int | str) -> int:
    """Converts a number of bytes, or one with a unit: "5GB", "500MB", "2GiB". Raises ConfigurationError."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B)\s*", str(size), re.IGNORECASE)
    if not match or float(match[1]) <= 0:
        raise ConfigurationError(f"max_shard_size: got {size!r}; needs bytes, or a text such as '5GB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def export_safetensors(
    path: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    process_group: Communicator | None = None,
    mesh: Mesh | None = None,
) -> None:
    """Writes the plain model's weights into the directory `path`, tied ones once. Collective; no rank gathers anything.

    model: as for `save`.
    max_shard_size: of a file, in bytes or as "5GB"; a larger tensor has a file of its own.
    dtype: to which floating tensors are converted; None: fp32 where there are fp32 masters, else as they are.
    mesh: where the model lies over pp, tp or ep of one, as for `save`; the files are those of one process.

    A model of transformers, and a GPT-2 or BERT of mpidl.models, gets its config.json and generation_config.json too:
    transformers' `from_pretrained(path)` opens it.

    Raises CheckpointError on every rank for what cannot be written, and beforehand for weights or settings there
    that are not of an earlier export of this model. An earlier export's files stay until all new ones are on the disk;
    then these take their names one after another, and what is left of the former is removed last.
    """
    engine = engine_of(model, optimizer, process_group, mesh, needed="mesh=, so that all of it is exported")
    wait(model)
    into = run_everywhere(engine.all_ranks, lambda: folder.path_of(path))
    if engine.join.reason is not None:
        raise ConfigurationError(f"export_safetensors: the parts of the model do not join: {engine.join.reason}")
    if engine.has_weights_per_rank and engine.comm.size > 1:
        raise ConfigurationError("export_safetensors: the ranks' weights differ; call average_parameters() before")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigurationError(f"dtype: got {dtype}; needs a floating dtype")
    limit = byte_count(max_shard_size)
    published = run_everywhere(engine.all_ranks, lambda: published_files(engine.model))
    all_held = [*engine.parameters, *engine.buffers]
    shared = {held.name: held.values for held in all_held if held.shared}
    labels = {held: engine.comparison_label(held, held.per_rank) for held in engine.parameters}
    copied = {f"{held.name}{label}": held.values for held, label in labels.items() if label is not None}
    engine.check_replicas(f"{path} was not exported", shared, copied)

    def own() -> Iterator[tuple[str, Share, torch.Tensor]]:
        for held in all_held:
            for share in held.writes if not held.per_rank or engine.comm.rank == 0 else ():
                engine.forget()  # the tensor before this one
                values = held.values if held.values.is_contiguous() else held.values.contiguous()
                yield held.name, share, held.elements(share, values).view(-1)

    parts_joined = engine.join
    declared = [(name, parts_joined.declared(name)) for name in (*parts_joined.parameters, *parts_joined.buffers)]
    tensors = [(name, _dtype(found.dtype, dtype), found.cut.shape) for name, found in declared]
    _export(engine.all_ranks, into, tensors, own, limit, published)


def export_checkpoint(
    path: str | Path,
    into: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    config: str | Path | None = None,
) -> None:
    """Exports weights from a checkpoint's directory, by one process that needs no model; checksums are compared.

    config: a directory with the config.json, and the generation_config.json if there is one, to copy to the weights;
    None: as the model had them when it was saved.
    """
    limit = byte_count(max_shard_size)
    content = index.read(folder.path_of(path))
    refuse_parts(content, "an export")
    with CheckpointReader(content) as reader:
        about = content.about["model"]
        names = [*about["parameters"], *about["buffers"]]
        sources = {name: f"model/{name}" for name in names if f"model/{name}" in content.tensors}
        differing = [name for name in names if name not in sources]
        if differing:
            raise CheckpointError(
                f"{content.file}: the ranks had each their own {differing[0]}; load it into a model, and export that"
            )

        def own() -> Iterator[tuple[str, Share, torch.Tensor]]:
            for name, source in sources.items():
                whole, at = cuts.whole(content.tensors[source].shape), 0
                for chunk in reader.chunks(source, BLOCK // content.tensors[source].dtype.itemsize):
                    yield name, Share(whole, at, at + chunk.numel()), chunk
                    at += chunk.numel()

        entries = {name: content.tensors[source] for name, source in sources.items()}
        tensors = [(name, _dtype(e.dtype, dtype), e.shape) for name, e in entries.items()]
        if config is None:
            published = _checked_settings(about.get("published", {}), content.path)
        else:
            published = _checked_settings(_settings_in(folder.path_of(config)), folder.path_of(config))
        _export(None, folder.path_of(into), tensors, own, limit, published)


def _settings_in(path: Path) -> dict[str, str]:
    """The texts of the settings in a directory."""
    found = {}
    for name in FILES:
        with contextlib.suppress(FileNotFoundError):
            found[name] = read_regular(path / name, LONGEST_INDEX).decode(errors="replace")
    if CONFIG not in found:
        raise CheckpointError(f"{path / CONFIG}: no such file")
    return found


def _checked_settings(published: Mapping[str, str], path: Path) -> Mapping[str, str]:
    """Returns the texts. Raises CheckpointError unless each is a JSON object. path: where they are from."""
    for name, text in published.items():
        try:
            mapping(lambda value: None)(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path / name}: cannot be read: {error}") from None
    return published


def _dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own


def _export(
    comm: Communicator | None,
    path: Path,
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    own: Callable[[], Iterable[tuple[str, Share, torch.Tensor]]],
    limit: int,
    published: Mapping[str, str],
) -> None:
    """Writes the files, each process its own elements. Collective, unless comm is None.

    own: yields this process's elements: a tensor's name, which of it, their values.
    limit: bytes of a file.
    published: the texts of the settings that lie next to the weights.
    """
    files = _lay_out(tensors, limit)
    shapes = {name: shape for name, _, shape in tensors}
    floating = next((dtype for _, dtype, _ in tensors if dtype.is_floating_point), torch.float32)
    settings = {name: with_dtype(text, floating) if name == CONFIG else text for name, text in published.items()}
    on_first = (lambda action: on_rank_0(comm, action)) if comm is not None else _in_one_process
    on_all = (lambda action: run_everywhere(comm, action)) if comm is not None else _in_one_process
    former = on_first(lambda: _earlier_weight_files(path, shapes, published))
    unfinished = {_temporary(path, file) for file in files}
    TEMP_PATHS.update(unfinished)
    try:
        on_first(lambda: _create(path, files))
        on_all(lambda: _write(path, files, own()))
        on_first(lambda: _finish(path, files, settings, former))
    except CheckpointError:
        on_first(lambda: _remove_unfinished(path, files))
        raise
    except BaseException:  # of this process alone, such as an interrupt
        _remove_unfinished(path, files)
        raise
    finally:
        TEMP_PATHS.difference_update(unfinished)


def _in_one_process(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error


def _earlier_weight_files(path: Path, shapes: Mapping[str, tuple[int, ...]], published: Mapping[str, str]) -> list[str]:
    """Lists the weight files of an earlier export of these tensors, of any dtypes and number of files.

    Raises CheckpointError for files of another model, which would be overwritten or mistaken for new ones.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for file in sorted(path.iterdir()):
            try:
                ours = _is_ours(file, shapes, published)
            except Exception:  # whatever stands in it
                ours = False
            if not ours:
                raise CheckpointError(
                    f"{file}: is not of an earlier export of this model, and nothing was exported; export to another "
                    "directory, or remove it"
                )
        return [file.name for file in path.iterdir() if _WEIGHTS.fullmatch(file.name)]
    return []


def _is_ours(file: Path, shapes: Mapping[str, tuple[int, ...]], published: Mapping[str, str]) -> bool:
    """Returns True for a file that this export may replace, or does not touch.

    Weights are of an earlier export if their header is the one that an export writes, in the model's order; other
    programs sort theirs.
    """
    if _WEIGHTS.fullmatch(file.name):
        with TensorFile(file) as opened:
            if any(shapes.get(name) != span.shape for name, span in opened.spans.items()):
                return False
            ordered = [(name, opened.spans[name].dtype, shapes[name]) for name in shapes if name in opened.spans]
            first, _ = header_of(ordered, {"format": "pt"})
            return checksum(first) == opened.header
    if file.name == INDEX:
        return bool(json.loads(read_regular(file, LONGEST_INDEX))["weight_map"].keys() <= shapes.keys())
    if file.name == CONFIG and CONFIG in published:
        return same_model(read_regular(file, LONGEST_INDEX).decode(), published[CONFIG])
    if file.name == GENERATION and GENERATION in published:
        return "transformers_version" in json.loads(read_regular(file, LONGEST_INDEX))
    return True


def _lay_out(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], limit: int) -> list[_File]:
    groups: list[list[tuple[str, torch.dtype, tuple[int, ...]]]] = [[]]
    size = 0
    for tensor in tensors:
        own = tensor[1].itemsize * TensorEntry(tensor[1], tensor[2]).count
        if groups[-1] and size + own > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += own
    files = []
    for number, group in enumerate(groups, 1):
        name = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        files.append(_File(name, *header_of(group, {"format": "pt"})))
    return files


def _temporary(path: Path, file: _File) -> Path:
    return path / f"{file.name}.tmp"


def _create(path: Path, files: Sequence[_File]) -> None:
    """Makes the files, of their full length, in place of what killed exports left."""
    folder.make(path)
    for left in path.glob("model*.safetensors.tmp"):
        if _WEIGHTS.fullmatch(left.stem):
            left.unlink(missing_ok=True)
    needed, free = sum(file.bytes for file in files), shutil.disk_usage(path).free
    if free < needed:
        raise CheckpointError(
            f"{path}: the disk is too full: the export takes {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are free"
        )
    for file in files:
        with naming_path(_temporary(path, file)), _temporary(path, file).open("xb", buffering=0) as made:
            write_all(made.fileno(), file.first)
            os.ftruncate(made.fileno(), file.bytes)


def _write(path: Path, files: Sequence[_File], own: Iterable[tuple[str, Share, torch.Tensor]]) -> None:
    where = {name: file for file in files for name in file.spans}
    with contextlib.ExitStack() as stack:
        opened: dict[str, Any] = {}
        for name, share, values in own:
            file = where[name]
            temporary, span = _temporary(path, file), file.spans[name]
            with naming_path(temporary):
                if file.name not in opened:
                    opened[file.name] = stack.enter_context(temporary.open("r+b", buffering=0))
                descriptor, size = opened[file.name].fileno(), span.dtype.itemsize
                step = BLOCK // max(size, values.dtype.itemsize)
                for start in range(0, values.numel(), step):
                    block = as_bytes(values[start : start + step].to(device="cpu", dtype=span.dtype))
                    first = share.start + start
                    for runs in cuts.common_runs(share.cut, cuts.whole(span.shape), first, first + len(block) // size):
                        for at, to, count in zip(*(array.tolist() for array in runs), strict=True):
                            part = block[(at - first) * size : (at - first + count) * size]
                            write_all(descriptor, part, span.begin + to * size)
        for file in files:
            if file.name in opened:
                with naming_path(_temporary(path, file)):
                    os.fsync(opened[file.name].fileno())


def _finish(path: Path, files: Sequence[_File], settings: Mapping[str, str], former: Sequence[str]) -> None:
    """Gives the files their names, writes the index and the settings, and removes what is left of the former export."""
    if len(files) > 1 and {file.name for file in files} & {*former}:
        # A kill from here on leaves files of both exports; without an index no reader takes them for one.
        (path / INDEX).unlink(missing_ok=True)
        folder.sync(path)
    for file in files:
        _temporary(path, file).replace(path / file.name)
    if len(files) > 1:
        total = sum(span.end - span.begin for file in files for span in file.spans.values())
        weight_map = {name: file.name for file in files for name in file.spans}
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        folder.write_text(path / INDEX, json.dumps(content, indent=2) + "\n")
    for name, text in settings.items():
        folder.write_text(path / name, text)
    folder.sync(path)
    kept = {file.name for file in files} | ({INDEX} if len(files) > 1 else set())
    for name in {INDEX, *former} - kept:
        (path / name).unlink(missing_ok=True)
    folder.sync(path)


def _remove_unfinished(path: Path, files: Sequence[_File]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            _temporary(path, file).unlink(missing_ok=True)
