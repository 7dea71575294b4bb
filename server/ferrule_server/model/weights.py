"""Read the safetensors of a Hugging Face folder into the tensors of the decoder.

The name, shape and dtype of every tensor are checked before memory is allocated. Then each tensor is read straight into
its final place: q, k and v are rows of one matrix, and so are gate and up. The bytes are hashed while they are read.
A matrix can be encoded, such as quantised, as soon as all its rows are there.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from io import FileIO
from math import prod
from pathlib import Path
from typing import Literal, Protocol

import torch

from ferrule_server.errors import ModelError
from ferrule_server.model.checkpoint import list_tensors, without_index
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.config_reader import read_config
from ferrule_server.model.gguf.blocks import dequantise
from ferrule_server.model.memory import new_tensor
from ferrule_server.model.parts import EMBEDDING, HEAD, TensorSpec, specs
from ferrule_server.model.stored import LAYOUTS, StoredTensor, without_stacks
from ferrule_server.model.tensors import ModelWeights, Place, StoredMatrix, allocate, on_meta
from ferrule_server.model_files import is_file, name_of, open_file, read_up_to

DTypeName = Literal["float32", "bfloat16", "float16"]
Progress = Callable[[int, int], None]

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK_BYTES = 8 << 20
_MAX_PROBLEMS = 100
_FIRST_BYTES = 1 << 16
_OTHER_HEAD = f"config.json ties the output head, yet {HEAD} differs from {EMBEDDING}"


class Encoding(Protocol):
    """In what form matrices are kept after they have been read: those of linear layers, the output head included.

    Attributes:
        name: Names the form and its version; part of the fingerprint. Empty: values are as they were.
        kept: The tensors whose blocks it takes as they are in the file.
    """

    name: str
    kept: Set[str]

    def takes(self, spec: TensorSpec) -> bool:
        """Return whether a tensor is encoded."""
        ...

    def encode(self, spec: TensorSpec, matrix: torch.Tensor | StoredMatrix) -> torch.Tensor:
        """Return what replaces a matrix [rows, inputs]; called by one thread, while the next matrix is read."""
        ...


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A model in memory, until the one executor that runs it takes the weights.

    Attributes:
        config: The network.
        model_id: Name of the folder, of the GGUF file without its ending, or of the model on the hub.
        dtype: ``float32``, ``bfloat16`` or ``float16``, of weights, activations and KV.
        fingerprint: 32 bytes over weights, dtypes and everything else that decides the KV.
        num_parameters: Distinct parameters, tied ones once.
        weights: None once they are taken.
        weights_bytes: Bytes of the weights in memory.
    """

    config: ModelConfig
    model_id: str
    dtype: DTypeName
    fingerprint: bytes
    num_parameters: int
    weights: ModelWeights | None
    weights_bytes: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch names it."""
        return TORCH_DTYPES[self.dtype]

    def take_weights(self) -> ModelWeights:
        """Return the weights and forget them: the executor may repack and free them one by one.

        Raises:
            ModelError: They were taken before.
        """
        if self.weights is None:
            raise ModelError(f"the weights of {self.model_id} were taken already; load the model again")
        weights, self.weights = self.weights, None
        return weights


def load_model(
    folder: Path,
    *,
    dtype: DTypeName,
    config: ModelConfig | None = None,
    on_progress: Progress | None = None,
    encoding: Encoding | None = None,
) -> LoadedModel:
    """Return the model of a Hugging Face folder or of a GGUF file, with its weights converted to ``dtype``.

    Args:
        folder: Holds config.json and *.safetensors, one file or shards with an index; or a GGUF file.
        dtype: Of weights, activations and KV.
        config: As the folder's config.json states it, for the context of the server; None: read it, for any context.
        on_progress: Called with (bytes read, bytes in total) after each chunk.
        encoding: In what form matrices are kept; None: as they are. Only an executor that knows it can use them.

    Raises:
        ModelError: The model is not supported, or its files do not hold exactly the tensors that it needs. The message
            names every tensor that is missing, unexpected, broken or of another shape. No weights are allocated then.
    """
    if config is None:
        config = read_config(folder)
    stored = check_tensors(folder, config)
    try:
        weights, places = allocate(config, TORCH_DTYPES[dtype], new_tensor, encoding.kept if encoding else frozenset())
    except (MemoryError, OSError, OverflowError, RuntimeError, ValueError) as error:
        raise ModelError(f"no memory for the weights of {folder}: {error}") from error
    num_parameters = sum(prod(spec.shape) for spec in specs(config))
    on_progress = on_progress or (lambda _done, _total: None)
    plain = nullcontext(lambda _name: None)
    with plain if encoding is None else _encoder(config, weights, places, encoding) as on_read:
        digests = _read_all(stored, places, on_progress, on_read)
    _check_tied_head(config, digests)
    return LoadedModel(
        config=config,
        model_id=_name_of_model(folder),
        dtype=dtype,
        fingerprint=_fingerprint(config, digests, dtype, encoding),
        num_parameters=num_parameters,
        weights=weights,
        weights_bytes=sum(tensor.nbytes for tensor in weights.tensors()),
    )


def _name_of_model(folder: Path) -> str:
    """Return the name of a model folder, or of a GGUF file without its ending and the number of a part."""
    name = re.sub(r"(-[0-9]{5}-of-[0-9]{5})?\.gguf$", "", folder.name) if is_file(folder) else folder.resolve().name
    return name.encode(errors="replace").decode()  # on a disk a name need not be UTF-8


def check_tensors(folder: Path, config: ModelConfig) -> list[StoredTensor]:
    """Return the tensors to read, in file order; refuse a folder that does not hold exactly what the model needs."""
    stored, accounted, problems = list_tensors(folder)
    if not stored and problems:  # why nothing could be read says more than what is missing for that reason
        raise ModelError(_complaint(folder, sorted(problems)))
    stored = of_text_model(config, stored)
    shapes = {name: tuple(place.tensor.shape) for name, place in on_meta(config)[1].items()}
    if config.is_tied and HEAD in stored:
        shapes[HEAD] = shapes[EMBEDDING]
    missing = shapes.keys() - stored.keys() - accounted
    if missing and (text := without_index(folder)):
        raise ModelError(_complaint(folder, [f"{len(missing)} tensors are missing: {text}"]))
    problems += [f"tensor {name} is missing, shape {list(shapes[name])}" for name in missing]
    wanted = [entry for name, entry in stored.items() if not is_ignorable(name)]
    problems += [problem for entry in wanted if (problem := _problem_of(entry, shapes))]
    if problems:
        raise ModelError(_complaint(folder, sorted(problems)))
    if config.is_tied and HEAD in stored and _first_bytes(stored[HEAD]) != _first_bytes(stored[EMBEDDING]):
        raise ModelError(_OTHER_HEAD)
    return sorted(wanted, key=lambda entry: (entry.path, entry.offset))


def _first_bytes(entry: StoredTensor) -> bytes:
    """Return the beginning of a tensor, in which two that differ usually do."""
    with open_file(entry.path.parent, entry.path.name) as file:
        file.seek(entry.offset)
        return read_up_to(file, min(entry.num_bytes, _FIRST_BYTES))


def of_text_model(config: ModelConfig, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of the text model in a model of several modalities, by the names that they have alone.

    Raises:
        ModelError: A tensor is stored under two of its names.
    """
    found: dict[str, StoredTensor] = {}
    for entry in without_stacks(stored.values()):
        name = entry.name
        if name.startswith(config.names.left_out):
            continue
        old, new = next((pair for pair in config.names.renamed if name.startswith(pair[0])), ("", ""))
        alone = new + name.removeprefix(old)
        if alone in found:
            raise ModelError(f"tensor {name_of(alone)} is stored twice, once as {name_of(name)}; remove one of them")
        found[alone] = replace(entry, name=alone)
    return found


def _complaint(folder: Path, problems: list[str]) -> str:
    """Return one message for everything that is wrong with a folder, with a bounded number of problems."""
    rest = len(problems) - _MAX_PROBLEMS
    more = [f"and {rest} more"] if rest > 0 else []
    kind = "file" if is_file(folder) else "folder"
    return "\n  - ".join([f"model {kind} {folder} cannot be loaded:", *problems[:_MAX_PROBLEMS], *more])


def is_ignorable(name: str) -> bool:
    """Return whether a tensor holds rotary frequencies, which old checkpoints store; config.json decides them."""
    return name.endswith("rotary_emb.inv_freq")


def _problem_of(entry: StoredTensor, shapes: dict[str, tuple[int, ...]]) -> str | None:
    name = name_of(entry.name)
    if entry.name not in shapes:
        return f"tensor {name} in {name_of(entry.path.name)} is unexpected"
    if entry.shape != shapes[entry.name]:
        return f"tensor {name} has shape {list(entry.shape)}, {list(shapes[entry.name])} is needed"
    if entry.dtype not in LAYOUTS:
        return f"tensor {name} has dtype {name_of(entry.dtype)}, supported: {', '.join(LAYOUTS)}"
    return None


def _read_all(
    stored: list[StoredTensor],
    places: dict[str, Place],
    on_progress: Progress,
    on_read: Callable[[str], None],
) -> dict[str, bytes]:
    """Fill every place. Return the SHA-256 of each tensor's dtype, shape and stored bytes.

    ``on_read`` is called with the name of each tensor that has been read.
    """
    total_bytes = sum(entry.num_bytes for entry in stored)
    done_bytes = 0
    digests: dict[str, bytes] = {}
    staging = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
    for entry in stored:
        digest = hashlib.sha256(f"{entry.dtype} {list(entry.shape)} ".encode())
        place = places.get(entry.name)
        for chunk in _chunks(entry, None if place is None else place.tensor, staging):
            digest.update(chunk)
            done_bytes += len(chunk)
            on_progress(done_bytes, total_bytes)
        digests[entry.name] = digest.digest()
        if place is not None:
            place.finish()
        on_read(entry.name)
    return digests


@contextmanager
def _encoder(
    config: ModelConfig, weights: ModelWeights, places: dict[str, Place], encoding: Encoding
) -> Iterator[Callable[[str], None]]:
    """Yield what notes that a tensor has been read: a matrix is replaced once all its parts have been.

    The next one is read meanwhile; no more than one is being replaced. Leaving the block waits for the last one, and
    raises what went wrong.

    Args:
        config: The network.
        weights: Changed.
        places: The parts that are still to be read, by name; those of a replaced matrix are removed.
        encoding: What replaces a matrix.
    """
    spec_of = {name: spec for spec in specs(config) if encoding.takes(spec) for name in spec.names}
    missing = Counter(spec_of.values())
    running = Future[None]()
    running.set_result(None)

    def put(spec: TensorSpec) -> None:
        holder = weights.holder(spec.layer)
        stored = weights.stored.pop(spec, None)
        holder[spec.key] = encoding.encode(spec, stored or holder[spec.key])

    def note(name: str) -> None:
        nonlocal running
        if (spec := spec_of.get(name)) is None:
            return
        del places[name]
        missing[spec] -= 1
        if not missing[spec]:
            running.result()
            running = worker.submit(put, spec)

    with ThreadPoolExecutor(1, "encode") as worker:
        yield note
    running.result()


def _chunks(entry: StoredTensor, place: torch.Tensor | None, staging: torch.Tensor) -> Iterator[memoryview]:
    """Read a tensor, straight into its place if the dtypes agree, else through ``staging``.

    Yield the stored bytes as buffers; each is valid until the next one is requested.

    Args:
        entry: The tensor to read.
        place: Its destination, contiguous; None: it is read for its digest only.
        staging: uint8 [_CHUNK_BYTES], scratch memory that tensors share.
    """
    num_values, block_bytes = LAYOUTS[entry.dtype]
    flat = None if place is None else place.reshape(-1)
    is_same = flat is not None and flat.dtype in (_STORED_DTYPES.get(entry.dtype), torch.uint8)
    own_bytes = flat.view(torch.uint8) if flat is not None and is_same else None
    chunk_bytes = _CHUNK_BYTES // (4 * num_values) * block_bytes  # as float32 they take as much as the largest chunk
    with open_file(entry.path.parent, entry.path.name) as file:
        file.seek(entry.offset)
        for begin in range(0, entry.num_bytes, chunk_bytes):
            end = min(begin + chunk_bytes, entry.num_bytes)
            raw = staging[: end - begin] if own_bytes is None else own_bytes[begin:end]
            buffer = memoryview(raw.numpy().data)
            _read_exactly(file, buffer, entry)
            if flat is not None and own_bytes is None:
                first, last = (num_bytes // block_bytes * num_values for num_bytes in (begin, end))
                flat[first:last].copy_(_values(entry.dtype, raw))
            yield buffer


def _values(dtype: str, raw: torch.Tensor) -> torch.Tensor:
    """Return the values of whole blocks of a type, uint8 [num_bytes]: any type [num_values], which may be a view."""
    if (plain := _STORED_DTYPES.get(dtype)) is not None:
        return raw.view(plain)
    return torch.from_numpy(dequantise(dtype, raw.numpy().reshape(-1, LAYOUTS[dtype][1]))).reshape(-1)


def _read_exactly(file: FileIO, buffer: memoryview, entry: StoredTensor) -> None:
    filled = 0
    while filled < len(buffer):
        try:
            num_read = file.readinto(buffer[filled:])
        except OSError as error:
            raise ModelError(f"{name_of(entry.path)} cannot be read: {error.strerror}") from error
        if not num_read:
            raise ModelError(f"{entry.path.name} ended inside tensor {entry.name}; did it change while it was read?")
        filled += num_read


def _check_tied_head(config: ModelConfig, digests: dict[str, bytes]) -> None:
    """Refuse a stored head that differs from the embedding to which config.json ties it."""
    if config.is_tied and digests.get(HEAD, digests[EMBEDDING]) != digests[EMBEDDING]:
        raise ModelError(_OTHER_HEAD)


def _fingerprint(config: ModelConfig, digests: dict[str, bytes], dtype: DTypeName, encoding: Encoding | None) -> bytes:
    """Return 32 bytes that are equal for equal networks, however their files are sharded."""
    network = asdict(replace(config, eos_ids=(), max_positions=1))
    del network["names"], network["blocks"]  # the digests are by name and type
    for kind in network["layers"]:
        if kind["experts"] is None:
            del kind["experts"]  # as before there were any
    network |= {"has_whole_norms": True} if config.names.has_whole_norms else {}
    digest = hashlib.sha256(b"ferrule-model-1\0")
    types = {"dtype": (encoding.name if encoding else "") or dtype, "kv_dtype": dtype}
    digest.update(json.dumps({"network": network, **types}, sort_keys=True).encode())
    for name in sorted(digests.keys() - ({HEAD} if config.is_tied else set())):
        digest.update(name.encode() + b"\0" + digests[name])
    return digest.digest()
