"""The Ferrule client: handles to the KV cache of a language model that runs elsewhere.

Importing this package loads grpc, protobuf and numpy, nothing more. Begin with ``Client.connect``::

    from ferrule_client import Client, greedy

    with Client.connect("127.0.0.1:50051") as client, client.prefill([1, 2, 3], policy=greedy()) as cache:
        output = cache.decode(cache.last.token, policy=greedy())

* ``Client``: a connection; makes caches.
* ``Cache``: one sequence on the server, the object that moves; ``cache.handle`` is the value at its tip.
* ``Generation``: tokens as the server draws them, of ``cache.generate`` and ``client.generate``.
* ``greedy``, ``sample``, ``full_logits``, ``no_output``: what to return for each row.
* ``Stream``: many caches decoded together, one frame per step.
* ``DecodeItem``, ``VerifyItem``, ``Chunk``: what a frame, or a batch of a scheduler of your own, is made of.
* ``ForwardPass``: rows of all positions, without a cache.
* ``ExecutorError``: the root of all errors; the tree is drawn in ``ferrule_client.errors``.
"""

from __future__ import annotations

from ferrule_client.admin import Admin
from ferrule_client.cache import Cache
from ferrule_client.client import Client
from ferrule_client.detokenizer import Detokenizer
from ferrule_client.errors import (
    AuthError,
    BlocksExhaustedError,
    CallCancelledError,
    ContextExceededError,
    DeadlineExceededError,
    DrainingError,
    EpochChangedError,
    ExceedsPoolError,
    ExecutorError,
    HandleExpiredError,
    HandleLostError,
    HandleNotFoundError,
    HandleStaleError,
    InstanceUnreachableError,
    InternalError,
    InvalidRequestError,
    MaskUnknownError,
    MessageTooLargeError,
    NonFiniteLogitsError,
    OutOfRangeError,
    QueueFullError,
    QuotaExceededError,
    ReplyTooLargeError,
    RequestIdReusedError,
    RequestTimeoutError,
    RequestTooLargeError,
    ResourceExhaustedError,
    SlowConsumerError,
    StartingError,
    TokenOutOfVocabError,
    TruncateBeyondError,
    UnavailableError,
    UnsupportedError,
    WrongInstanceError,
)
from ferrule_client.forward import ForwardPass
from ferrule_client.generation import (
    Branch,
    Generation,
    TextGeneration,
)
from ferrule_client.items import Chunk, DecodeItem, DraftDistributions, VerifyItem
from ferrule_client.masks import MaskLike, TokenMask
from ferrule_client.policy import (
    DType,
    Greedy,
    Policy,
    Sampling,
    full_logits,
    greedy,
    no_output,
    sample,
)
from ferrule_client.stream import Stream
from ferrule_client.types import (
    Acceptance,
    CacheInfo,
    CacheMetrics,
    CacheSummary,
    Caller,
    Capabilities,
    ChatMessage,
    ChatPrompt,
    Drained,
    DrawnToken,
    FinishReason,
    FloatArray,
    ForwardChunk,
    Handle,
    Lease,
    MemoryUsage,
    ModelInfo,
    OnStale,
    Output,
    Pooling,
    Quotas,
    Released,
    Reservation,
    Status,
    Timing,
    TlsConfig,
    TokenLogprob,
    Tokens,
    Verification,
    Warmed,
    WarmStep,
)
from ferrule_client.views import BlockMap, Histogram, PrincipalView, SequenceView, ServerView

__version__ = "0.1.0"

__all__ = [
    "Acceptance",
    "Admin",
    "AuthError",
    "BlockMap",
    "BlocksExhaustedError",
    "Branch",
    "Cache",
    "CacheInfo",
    "CacheMetrics",
    "CacheSummary",
    "CallCancelledError",
    "Caller",
    "Capabilities",
    "ChatMessage",
    "ChatPrompt",
    "Chunk",
    "Client",
    "ContextExceededError",
    "DType",
    "DeadlineExceededError",
    "DecodeItem",
    "Detokenizer",
    "DraftDistributions",
    "Drained",
    "DrainingError",
    "DrawnToken",
    "EpochChangedError",
    "ExceedsPoolError",
    "ExecutorError",
    "FinishReason",
    "FloatArray",
    "ForwardChunk",
    "ForwardPass",
    "Generation",
    "Greedy",
    "Handle",
    "HandleExpiredError",
    "HandleLostError",
    "HandleNotFoundError",
    "HandleStaleError",
    "Histogram",
    "InstanceUnreachableError",
    "InternalError",
    "InvalidRequestError",
    "Lease",
    "MaskLike",
    "MaskUnknownError",
    "MemoryUsage",
    "MessageTooLargeError",
    "ModelInfo",
    "NonFiniteLogitsError",
    "OnStale",
    "OutOfRangeError",
    "Output",
    "Policy",
    "Pooling",
    "PrincipalView",
    "QueueFullError",
    "QuotaExceededError",
    "Quotas",
    "Released",
    "ReplyTooLargeError",
    "RequestIdReusedError",
    "RequestTimeoutError",
    "RequestTooLargeError",
    "Reservation",
    "ResourceExhaustedError",
    "Sampling",
    "SequenceView",
    "ServerView",
    "SlowConsumerError",
    "StartingError",
    "Status",
    "Stream",
    "TextGeneration",
    "Timing",
    "TlsConfig",
    "TokenLogprob",
    "TokenMask",
    "TokenOutOfVocabError",
    "Tokens",
    "TruncateBeyondError",
    "UnavailableError",
    "UnsupportedError",
    "Verification",
    "VerifyItem",
    "WarmStep",
    "Warmed",
    "WrongInstanceError",
    "__version__",
    "full_logits",
    "greedy",
    "no_output",
    "sample",
]
