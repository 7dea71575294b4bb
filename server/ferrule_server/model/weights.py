"""Read the safetensors of a Hugging Face folder into the tensors of the decoder.

The name, shape and dtype of every tensor are checked before memory is allocated. Then each tensor is read straight into
its final place: q, k and v are rows of one matrix, and so are gate and up. The bytes are hashed while they are read.
A matrix can be encoded, such as quantised, as soon as all its rows are there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from io import FileIO
from pathlib import Path
from typing import Literal

import torch

from ferrule_server.errors import ModelError
from ferrule_server.model.checkpoint import DTYPE_BYTES, StoredTensor, list_tensors
from ferrule_server.model.config import ModelConfig, read_config
from ferrule_server.model.memory import new_tensor
from ferrule_server.model_files import name_of, open_file

__all__ = ["Encoding", "LayerWeights", "LoadedModel", "ModelWeights", "load_model"]

DTypeName = Literal["float32", "bfloat16"]
Progress = Callable[[int, int], None]

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK_BYTES = 8 << 20
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_MATRICES = ("qkv", "attention_out", "gate_up", "down")
_MAX_PROBLEMS = 100


@dataclass(slots=True)
class LayerWeights:
    """The weights of one decoder layer, all of one dtype.

    ``q`` stands for num_heads * head_dim, and ``kv`` for num_kv_heads * head_dim.

    Attributes:
        input_norm: [hidden_size].
        qkv: [q + kv + kv, hidden_size]; rows of q, then k, then v.
        qkv_bias: [q + kv + kv], or None.
        q_norm: [head_dim], or None.
        k_norm: [head_dim], or None.
        attention_out: [hidden_size, q].
        attention_out_bias: [hidden_size], or None.
        post_attention_norm: [hidden_size].
        gate_up: [2 * intermediate_size, hidden_size]; rows of gate, then up.
        gate_up_bias: [2 * intermediate_size], or None.
        down: [hidden_size, intermediate_size].
        down_bias: [hidden_size], or None.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    attention_out: torch.Tensor
    post_attention_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    qkv_bias: torch.Tensor | None = None
    attention_out_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(slots=True)
class ModelWeights:
    """Every tensor of a model.

    Attributes:
        embedding: [vocab_size, hidden_size].
        head: [vocab_size, hidden_size]; if tied, the tensor ``embedding`` itself.
        final_norm: [hidden_size].
        layers: In order.
    """

    embedding: torch.Tensor
    head: torch.Tensor
    final_norm: torch.Tensor
    layers: list[LayerWeights] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Encoding:
    """In what form matrices are kept after they have been read: those of linear layers, the output head included.

    Attributes:
        name: Names the form and its version; part of the fingerprint. Empty: values are as they were.
        encode: Called with the name of a field of :class:`LayerWeights`, or ``head``, and a matrix [rows, inputs];
            returns what replaces it. Called by one thread at a time, while the next matrix is read.
    """

    name: str
    encode: Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A model in memory, until the one executor that runs it takes the weights.

    Attributes:
        config: The network.
        model_id: Name of the folder, or of the model on the hub.
        dtype: ``float32`` or ``bfloat16``, of weights, activations and KV.
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
        return _TORCH_DTYPES[self.dtype]

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
    folder: Path, *, dtype: DTypeName, on_progress: Progress | None = None, encoding: Encoding | None = None
) -> LoadedModel:
    """Return the model of a Hugging Face folder, with its weights converted to ``dtype``.

    Args:
        folder: Holds config.json and *.safetensors, one file or shards with an index.
        dtype: Of weights, activations and KV.
        on_progress: Called with (bytes read, bytes in total) after each chunk.
        encoding: In what form matrices are kept; None: as they are. Only an executor that knows it can use them.

    Raises:
        ModelError: The model is not supported, or its files do not hold exactly the tensors that it needs. The message
            names every tensor that is missing, unexpected, broken or of another shape. No weights are allocated then.
    """
    config = read_config(folder)
    stored = _check_tensors(folder, config)
    try:
        weights, places = _allocate(config, _TORCH_DTYPES[dtype], new_tensor)
    except (MemoryError, OSError, OverflowError, RuntimeError, ValueError) as error:
        raise ModelError(f"no memory for the weights of {folder}: {error}") from error
    num_parameters = sum(place.numel() for place in places.values())
    on_progress = on_progress or (lambda _done, _total: None)
    if encoding is None:
        digests = _read_all(stored, places, on_progress, lambda _name: None)
    else:
        with _Encoder(config, weights, places, encoding.encode) as encoder:
            digests = _read_all(stored, places, on_progress, encoder.add)
    _check_tied_head(config, digests)
    return LoadedModel(
        config=config,
        model_id=folder.resolve().name.encode(errors="replace").decode(),  # on a disk a name need not be UTF-8
        dtype=dtype,
        fingerprint=_fingerprint(config, digests, dtype, encoding),
        num_parameters=num_parameters,
        weights=weights,
        weights_bytes=_num_bytes(weights),
    )


def _allocate(
    config: ModelConfig, dtype: torch.dtype, new: Callable[[Sequence[int], torch.dtype], torch.Tensor]
) -> tuple[ModelWeights, dict[str, torch.Tensor]]:
    """Return empty weights, and the part of them that each tensor of the checkpoint fills, by its name."""
    vocab_shape = (config.vocab_size, config.hidden_size)
    embedding = new(vocab_shape, dtype)
    head = embedding if config.is_tied else new(vocab_shape, dtype)
    weights = ModelWeights(embedding, head, new((config.hidden_size,), dtype))
    places = {_EMBEDDING: embedding, "model.norm.weight": weights.final_norm}
    if not config.is_tied:
        places[_HEAD] = head
    parts_by_field = _layer_parts(config)
    for index in range(config.num_layers):
        tensors = {}
        for name, parts in parts_by_field.items():
            num_rows = [shape[0] for shape in parts.values()]
            tensors[name] = new((sum(num_rows), *next(iter(parts.values()))[1:]), dtype)
            pieces = torch.split(tensors[name], num_rows)
            places.update((f"model.layers.{index}.{part}", piece) for part, piece in zip(parts, pieces, strict=True))
        weights.layers.append(LayerWeights(**tensors))
    return weights, places


def _layer_parts(config: ModelConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return, for each field of :class:`LayerWeights`, the shapes of its parts by their names in the checkpoint.

    The rows of the parts follow each other in the field.
    """
    hidden, intermediate = config.hidden_size, config.intermediate_size
    num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = {"self_attn.q_proj": num_q, "self_attn.k_proj": num_kv, "self_attn.v_proj": num_kv}
    projections = (
        ("qkv", qkv, hidden, config.has_qkv_bias),
        ("attention_out", {"self_attn.o_proj": hidden}, num_q, config.has_attention_out_bias),
        ("gate_up", {"mlp.gate_proj": intermediate, "mlp.up_proj": intermediate}, hidden, config.has_mlp_bias),
        ("down", {"mlp.down_proj": hidden}, intermediate, config.has_mlp_bias),
    )
    parts: dict[str, dict[str, tuple[int, ...]]] = {
        "input_norm": {"input_layernorm.weight": (hidden,)},
        "post_attention_norm": {"post_attention_layernorm.weight": (hidden,)},
    }
    if config.has_qk_norm:
        parts |= {f"{name}_norm": {f"self_attn.{name}_norm.weight": (config.head_dim,)} for name in "qk"}
    for field_name, rows, width, has_bias in projections:
        parts[field_name] = {f"{name}.weight": (num_rows, width) for name, num_rows in rows.items()}
        if has_bias:
            parts[f"{field_name}_bias"] = {f"{name}.bias": (num_rows,) for name, num_rows in rows.items()}
    return parts


def _check_tensors(folder: Path, config: ModelConfig) -> list[StoredTensor]:
    """Return the tensors to read, in file order; refuse a folder that does not hold exactly what the model needs."""
    stored, accounted, problems = list_tensors(folder)
    _, places = _allocate(config, torch.float32, lambda shape, dtype: torch.empty(*shape, dtype=dtype, device="meta"))
    shapes = {name: tuple(place.shape) for name, place in places.items()}
    if config.is_tied and _HEAD in stored:
        shapes[_HEAD] = shapes[_EMBEDDING]
    for name in shapes.keys() - stored.keys() - accounted:
        problems.append(f"tensor {name} is missing, shape {list(shapes[name])}")
    wanted = [entry for name, entry in stored.items() if not _is_ignorable(name)]
    problems += [problem for entry in wanted if (problem := _problem_of(entry, shapes))]
    if problems:
        raise ModelError(_complaint(folder, sorted(problems)))
    return sorted(wanted, key=lambda entry: (entry.path, entry.offset))


def _complaint(folder: Path, problems: list[str]) -> str:
    """Return one message for everything that is wrong with a folder, with a bounded number of problems."""
    rest = len(problems) - _MAX_PROBLEMS
    more = [f"and {rest} more"] if rest > 0 else []
    return "\n  - ".join([f"model folder {folder} cannot be loaded:", *problems[:_MAX_PROBLEMS], *more])


def _is_ignorable(name: str) -> bool:
    """Return whether a tensor holds rotary frequencies, which old checkpoints store; config.json decides them."""
    return name.endswith("rotary_emb.inv_freq")


def _problem_of(entry: StoredTensor, shapes: dict[str, tuple[int, ...]]) -> str | None:
    name = name_of(entry.name)
    if entry.name not in shapes:
        return f"tensor {name} in {name_of(entry.path.name)} is unexpected"
    if entry.shape != shapes[entry.name]:
        return f"tensor {name} has shape {list(entry.shape)}, {list(shapes[entry.name])} is needed"
    if entry.dtype not in DTYPE_BYTES:
        return f"tensor {name} has dtype {name_of(entry.dtype)}, supported: {', '.join(DTYPE_BYTES)}"
    return None


def _read_all(
    stored: list[StoredTensor],
    places: dict[str, torch.Tensor],
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
        reader = _ChunkReader(entry, places.get(entry.name), staging)
        for chunk in reader.chunks():
            digest.update(chunk)
            done_bytes += len(chunk)
            on_progress(done_bytes, total_bytes)
        digests[entry.name] = digest.digest()
        del reader
        on_read(entry.name)
    return digests


def _num_bytes(weights: ModelWeights) -> int:
    tensors = [weights.embedding, weights.final_norm]
    tensors += [] if weights.head is weights.embedding else [weights.head]
    for layer in weights.layers:
        tensors += [tensor for item in fields(layer) if (tensor := getattr(layer, item.name)) is not None]
    return sum(tensor.nbytes for tensor in tensors)


class _Encoder:
    """Replaces each matrix of the weights when all its parts have been read, while the next one is read.

    Leaving the block waits for the last one, and raises what went wrong. No more than one matrix is being replaced.

    Args:
        config: The network.
        weights: Changed.
        places: The parts that are still to be read, by name; those of a replaced matrix are removed.
        encode: ``Encoding.encode``.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        places: dict[str, torch.Tensor],
        encode: Callable[[str, torch.Tensor], torch.Tensor],
    ) -> None:
        self._weights, self._places, self._encode = weights, places, encode
        self._missing = {
            (index, field_name): {f"model.layers.{index}.{part}" for part in parts}
            for index in range(config.num_layers)
            for field_name, parts in _layer_parts(config).items()
            if field_name in _MATRICES
        }
        self._missing[-1, "head"] = {_EMBEDDING if config.is_tied else _HEAD}
        self._matrix_of = {name: matrix for matrix, names in self._missing.items() for name in names}
        self._worker = ThreadPoolExecutor(1, "encode")
        self._running: Future[None] | None = None

    def __enter__(self) -> _Encoder:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.shutdown()
        if self._running is not None:
            self._running.result()

    def add(self, name: str) -> None:
        """Note that a tensor has been read."""
        if name not in self._matrix_of:
            return
        matrix = self._matrix_of.pop(name)
        del self._places[name]
        self._missing[matrix].discard(name)
        if self._missing[matrix]:
            return
        if self._running is not None:
            self._running.result()
        self._running = self._worker.submit(self._replace, *matrix)

    def _replace(self, index: int, field_name: str) -> None:
        holder = self._weights if index < 0 else self._weights.layers[index]
        matrix = getattr(holder, field_name)
        is_embedding = matrix is self._weights.embedding
        encoded = self._encode(field_name, matrix)
        setattr(holder, field_name, encoded)
        if is_embedding:
            self._weights.embedding = encoded


class _ChunkReader:
    """Reads one tensor in chunks: straight into its place if the dtypes agree, else through ``staging``.

    Args:
        entry: The tensor to read.
        place: Its destination, contiguous; None: it is read for its digest only.
        staging: uint8 [_CHUNK_BYTES], scratch memory that tensors share.
    """

    def __init__(self, entry: StoredTensor, place: torch.Tensor | None, staging: torch.Tensor) -> None:
        self._entry = entry
        self._place = None if place is None else place.reshape(-1)
        self._staging = staging
        self._stored_dtype = _STORED_DTYPES[entry.dtype]

    def chunks(self) -> Iterator[memoryview]:
        """Yield the stored bytes as buffers; each is valid until the next one is requested."""
        with open_file(self._entry.path) as file:
            file.seek(self._entry.offset)
            for begin in range(0, self._entry.num_bytes, _CHUNK_BYTES):
                end = min(begin + _CHUNK_BYTES, self._entry.num_bytes)
                raw = self._destination(begin, end)
                buffer = memoryview(raw.numpy().data)
                _read_exactly(file, buffer, self._entry)
                self._convert(raw, begin, end)
                yield buffer

    def _destination(self, begin: int, end: int) -> torch.Tensor:
        if self._place is not None and self._place.dtype == self._stored_dtype:
            return self._place.view(torch.uint8)[begin:end]
        return self._staging[: end - begin]

    def _convert(self, raw: torch.Tensor, begin: int, end: int) -> None:
        if self._place is not None and self._place.dtype != self._stored_dtype:
            size = self._stored_dtype.itemsize
            self._place[begin // size : end // size].copy_(raw.view(self._stored_dtype))


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
    if config.is_tied and digests.get(_HEAD, digests[_EMBEDDING]) != digests[_EMBEDDING]:
        raise ModelError(f"config.json ties the output head, yet {_HEAD} differs from {_EMBEDDING}")


def _fingerprint(config: ModelConfig, digests: dict[str, bytes], dtype: DTypeName, encoding: Encoding | None) -> bytes:
    """Return 32 bytes that are equal for equal networks, however their files are sharded."""
    network = asdict(replace(config, eos_ids=(), max_positions=1))
    digest = hashlib.sha256(b"ferrule-model-1\0")
    types = {"dtype": (encoding.name if encoding else "") or dtype, "kv_dtype": dtype}
    digest.update(json.dumps({"network": network, **types}, sort_keys=True).encode())
    for name in sorted(digests.keys() - ({_HEAD} if config.is_tied else set())):
        digest.update(name.encode() + b"\0" + digests[name])
    return digest.digest()
