"""Restore: the state that a journal describes becomes sequences, records of answers and creations again."""

from __future__ import annotations

from ferrule_server.durability.records import Creation as CreationState
from ferrule_server.durability.records import SequenceState
from ferrule_server.engine.appends.creations import Creations
from ferrule_server.engine.appends.records import ANY, ReplayRecords
from ferrule_server.engine.appends.running import Creation
from ferrule_server.engine.durable.answers import record_of
from ferrule_server.engine.durable.opening import Durability
from ferrule_server.engine.jobs import Verified
from ferrule_server.kv.handle import Handle
from ferrule_server.kv.sequence import Sequence, Truncation
from ferrule_server.kv.sequence_store import SequenceStore


def restore(
    durability: Durability, store: SequenceStore, records: ReplayRecords, creations: Creations
) -> dict[int, Sequence]:
    """Add what a journal describes to an empty store, and return the sequences by their numbers in the journal.

    All of them are cold. Quotas are not checked: what was promised is kept, and only new requests are refused.

    If another version has written the digests of requests, a repeated request is known by its tokens, its drafts and
    its request_id alone, since a wrong refusal would be worse.

    Args:
        durability: The journal as it was read.
        store: Where the sequences go.
        records: Where their last answers go.
        creations: Where goes what requests have created.
    """
    state, knows_digests = durability.state, durability.knows_digests
    sequences = {no: _sequence_of(each, durability.root, store) for no, each in state.sequences.items()}
    store.register_restored(list(sequences.values()))
    for no, each in state.sequences.items():
        answer = each.answer
        if answer is not None and answer.start + answer.num_tokens <= sequences[no].length:
            record = record_of(answer, sequences[no])
            if not knows_digests:
                record.output, record.drafts = ANY, record.drafts and ANY
            records.restore(sequences[no].handle_id, record)
    now = store.clock()
    for secret, principal in state.tombstones.items():
        store.registry.restore_tombstone(principal, store.registry.durable_cache_id(secret), now)
    for creation in state.creations.values():
        known = creation if knows_digests else creation._replace(content=ANY, loop=b"")
        _restore_creation(known, sequences, store, creations)
    return sequences


def _sequence_of(state: SequenceState, root: bytes, store: SequenceStore) -> Sequence:
    sequence = store.restore(root, state.secret, state.principal, state.token_ids, state.ttl_s)
    sequence.is_published = state.is_published
    sequence.reserved_length = min(state.reserved_length, store.max_context)  # which may be lower than before
    sequence.parent_handle_id = state.parent_handle_id
    sequence.window = state.window
    if state.truncation is not None:
        length, lineage, new_length, freed_blocks = state.truncation
        sequence.last_truncate = Truncation(Handle(sequence.cache_id, length, lineage), new_length, freed_blocks)
    return sequence


def _restore_creation(
    state: CreationState, sequences: dict[int, Sequence], store: SequenceStore, creations: Creations
) -> None:
    live = [sequences[member] for member in state.members if isinstance(member, int)]
    cache_ids = [
        sequences[member].cache_id if isinstance(member, int) else store.registry.durable_cache_id(member)
        for member in state.members
    ]
    creation = Creation((state.principal, state.request_id), state.content, state.loop)
    creation.handles = tuple(Handle(cache_id, state.length, state.lineage) for cache_id in cache_ids)
    creation.start, creation.seed = state.start, state.seed
    creation.verified = None if state.verified is None else Verified(*state.verified)
    creations.restore(creation, [sequence.handle_id for sequence in live])
