"""What calls take and return, besides the names of ``ferrule`` itself."""

from ferrule_client.aio.branches import AsyncBranches
from ferrule_client.aio.cache import AsyncCache
from ferrule_client.aio.chat import AsyncChat
from ferrule_client.aio.detokenizer import AsyncDetokenizer
from ferrule_client.aio.forward import AsyncForwardPass
from ferrule_client.aio.generation import AsyncBranch, AsyncGeneration
from ferrule_client.aio.stream import AsyncStream
from ferrule_client.items import Append, DraftDistributions, Item, Prompt, Verify
from ferrule_client.masks import MaskLike, TokenMask
from ferrule_client.policy import DType, Sampling, Settings
from ferrule_client.sync.detokenizer import Detokenizer
from ferrule_client.sync.forward import ForwardPass
from ferrule_client.sync.generation import Branch, Generation
from ferrule_client.types import (
    Acceptance,
    Answer,
    CacheInfo,
    CacheSummary,
    Capabilities,
    ChatMessage,
    ChatPrompt,
    Durability,
    FinishReason,
    FloatArray,
    ForwardChunk,
    Lease,
    ModelInfo,
    OnStale,
    Output,
    Pending,
    Pooling,
    Released,
    Reservation,
    Rows,
    Score,
    Status,
    Timing,
    TlsConfig,
    Token,
    TokenLogprob,
    Tokens,
    Verification,
    WithText,
)

__all__ = [
    "Acceptance",
    "Answer",
    "Append",
    "AsyncBranch",
    "AsyncBranches",
    "AsyncCache",
    "AsyncChat",
    "AsyncDetokenizer",
    "AsyncForwardPass",
    "AsyncGeneration",
    "AsyncStream",
    "Branch",
    "CacheInfo",
    "CacheSummary",
    "Capabilities",
    "ChatMessage",
    "ChatPrompt",
    "DType",
    "Detokenizer",
    "DraftDistributions",
    "Durability",
    "FinishReason",
    "FloatArray",
    "ForwardChunk",
    "ForwardPass",
    "Generation",
    "Item",
    "Lease",
    "MaskLike",
    "ModelInfo",
    "OnStale",
    "Output",
    "Pending",
    "Pooling",
    "Prompt",
    "Released",
    "Reservation",
    "Rows",
    "Sampling",
    "Score",
    "Settings",
    "Status",
    "Timing",
    "TlsConfig",
    "Token",
    "TokenLogprob",
    "TokenMask",
    "Tokens",
    "Verification",
    "Verify",
    "WithText",
]
