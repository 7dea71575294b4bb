"""Limits of messages and streams, which GetCapabilities publishes, and of the time that a message may take."""

from __future__ import annotations

from dataclasses import dataclass

from ferrule_server.kv.sequence_store import DEFAULT_TTL_S
from ferrule_server.quotas import MIN_TTL_S

LOOP_SLICE = 256
"""Entries of one request that are processed before others get their turn on the event loop: a few milliseconds."""


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """The limits of what the server receives from a client and sends to it.

    Attributes:
        max_request_bytes: Largest request; for a larger one gRPC itself answers RESOURCE_EXHAUSTED. A message is copied
            without interruption, about 2 ms for each MiB. Most methods have a smaller bound (``receiving/bounds.py``),
            beyond which the answer is REQUEST_TOO_LARGE.
        max_receiving_bytes: Memory of all requests together, from when they are read until they are parsed.
        message_timeout_s: How long the message of a call may take to arrive, in seconds.
        max_connections: Most connections; more are closed at once.
        max_streams_per_connection: Most calls under way on one connection; clients queue further calls.
        max_reply_bytes: Largest reply; a request whose reply could be larger is refused before it runs.
        max_stream_frame_bytes: A stream's results of one step are split into frames of at most this size, a single
            larger result is a frame by itself. gRPC clients accept 4 MiB by default.
        max_stream_queue_bytes: Most unread bytes of results of earlier steps when a step ends; with more, the stream
            ends with SLOW_CONSUMER.
        max_top_logprobs: Largest ``top_logprobs``.
        max_fork_count: Most sequences that one ForkCache creates.
        max_page_size: Largest page of ListCaches.
        default_page_size: Page of ListCaches if the client sets none.
        max_request_id_bytes: Longest ``request_id``, UTF-8.
        max_cache_id_chars: Longest ``cache_id``, in characters.
        max_handles_per_request: Most handles in one KeepAlive, ReleaseCache or ReserveKvSlots, and to release in one
            stream frame. Clients send a longer list in several requests, and others are served in between.
        max_items_per_frame: Most items in one frame of a stream. The event loop reads a frame without a pause, and so
            does the engine thread, so this limit bounds the delay of all others.
        max_draft_tokens: Most drafts in one verify.
        max_masks_per_request: Most masks in one RegisterTokenMask.
        max_logprob_token_ids: Most ``logprob_token_ids`` in one policy.
        max_logit_biases: Most entries of ``logit_bias`` in one policy.
        max_stops: Most stop token ids, stop sequences and stop strings in one Generate, each.
        max_stop_tokens: Longest stop sequence, in tokens.
        max_stop_bytes: Longest stop string, in bytes of UTF-8.
        stream_window_bytes: How far Generate may run ahead of its reader; Forward, whose rows are large, always has
            room for two chunks.
        max_text_bytes: Longest text of Tokenize, in bytes of UTF-8; more than any context holds.
        max_text_tokens: Most token ids of TokenizerService Detokenize.
        min_ttl_s: Shortest lease, in seconds.
        default_ttl_s: Lease if the client sets none.
        max_ttl_s: Longest lease.
    """

    max_request_bytes: int = 4 << 20
    max_receiving_bytes: int = 64 << 20
    message_timeout_s: float = 30.0
    max_connections: int = 1024
    max_streams_per_connection: int = 256
    max_reply_bytes: int = 64 << 20
    max_stream_frame_bytes: int = (4 << 20) - (64 << 10)
    max_stream_queue_bytes: int = 16 << 20
    max_top_logprobs: int = 1024
    max_fork_count: int = 256
    max_page_size: int = 1000
    default_page_size: int = 100
    max_request_id_bytes: int = 128
    max_cache_id_chars: int = 128
    max_handles_per_request: int = 512
    max_items_per_frame: int = 4096
    max_draft_tokens: int = 64
    max_masks_per_request: int = 64
    max_logprob_token_ids: int = 1024
    max_logit_biases: int = 4096
    max_stops: int = 64
    max_stop_tokens: int = 1024
    max_stop_bytes: int = 1024
    stream_window_bytes: int = 4 << 20
    max_text_bytes: int = 1 << 20
    max_text_tokens: int = 1 << 15
    min_ttl_s: float = MIN_TTL_S
    default_ttl_s: float = DEFAULT_TTL_S
    max_ttl_s: float = 3600.0
