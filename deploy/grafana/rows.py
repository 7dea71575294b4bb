"""What the dashboard shows, row by row."""

from __future__ import annotations

from typing import Final

from panel import AMBER, RED, Panel, Query, mean, quantiles, rate, stat

ROWS: Final[dict[str, tuple[Panel, ...]]] = {
    "Overview": (
        stat(
            "Servers that take prompts",
            "In the state ready or busy. Fewer than you run: see the state of each below, and the alerts.",
            "short",
            'count(ferrule_state{, state=~"ready|busy"} == 1) or vector(0)',
        ),
        stat("Sequences", "Live, of all principals.", "short", "sum(ferrule_sequences{})"),
        stat(
            "Generated tokens",
            "By Generate, and appended by decodes of clients' own loops.",
            "short",
            f"{rate('ferrule_generated_tokens_total')}",
        ),
        stat(
            "Time to first token, p50",
            "From the arrival of a prompt to its first token.",
            "s",
            quantiles("ferrule_time_to_first_token_seconds", 0.5)[0].expression,
        ),
        stat(
            "KV pool",
            "Held by sequences, on the fullest server. Cached blocks are free ones.",
            "percentunit",
            "max(ferrule_kv_usage_ratio{})",
            (0.75, AMBER),
            (0.9, RED),
        ),
        stat(
            "Alerts",
            "Firing now; http://127.0.0.1:9090/alerts says which.",
            "short",
            'count(ALERTS{alertstate="firing", alertname=~"Ferrule.*"}) or vector(0)',
            (1, RED),
        ),
    ),
    "Traffic": (
        Panel("Calls", "Ended, by method.", "reqps", (Query(rate("ferrule_rpcs_total", "rpc"), "{{rpc}}"),)),
        Panel(
            "Calls that failed",
            "By code and reason; docs/handles.md has what each means. ABORTED / HANDLE_STALE changed nothing.",
            "reqps",
            (Query(rate("ferrule_rpcs_total", "code, reason", 'code!="OK"'), "{{code}} {{reason}}"),),
        ),
        Panel(
            "Refused",
            "Jobs and parts of batches and streams, by reason: what was not even tried.",
            "reqps",
            (Query(rate("ferrule_refused_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Tokens",
            "Prompt tokens that were run (those found in the prefix cache were not), and generated ones.",
            "short",
            (
                Query(rate("ferrule_prompt_tokens_total"), "prompt tokens/s"),
                Query(rate("ferrule_generated_tokens_total"), "generated tokens/s"),
            ),
            width=6,
        ),
        Panel(
            "Under way",
            "Calls by method; a stream counts as long as it is open.",
            "short",
            (Query("sum by (rpc) (ferrule_rpcs_in_flight{})", "{{rpc}}"),),
            width=6,
            is_stacked=True,
        ),
        Panel(
            "Generates and Forwards",
            "Under way, and those that wait for a client that does not read.",
            "short",
            (
                Query("sum(ferrule_streams_active{})", "active"),
                Query("sum(ferrule_streams_parked{})", "parked"),
                Query(rate("ferrule_slow_consumers_total"), "ended for slow reading /s"),
            ),
            width=6,
        ),
        Panel(
            "Ends of texts",
            "Why Generates stopped. blocks_exhausted: the pool was full in the middle of a text.",
            "short",
            (Query(rate("ferrule_branches_finished_total", "finish"), "{{finish}}/s"),),
            width=6,
        ),
    ),
    "Latency": (
        Panel(
            "Time to first token",
            "From the arrival of a prompt to its first token.",
            "s",
            quantiles("ferrule_time_to_first_token_seconds", 0.5, 0.9, 0.99),
        ),
        Panel(
            "Between tokens of a Generate",
            "What a reader of a text sees.",
            "s",
            quantiles("ferrule_inter_token_seconds", 0.5, 0.9, 0.99),
        ),
        Panel(
            "Decodes of clients' own loops",
            "One-token appends and verifies, from their arrival to their commit.",
            "s",
            quantiles("ferrule_decode_seconds", 0.5, 0.9, 0.99),
        ),
        Panel("Steps", "One run of the model.", "s", quantiles("ferrule_step_seconds", 0.5, 0.9, 0.99)),
        Panel(
            "In the queue",
            "How long a request waits for its first step. Grows before anything else when there is too much to do.",
            "s",
            quantiles("ferrule_queue_seconds", 0.5, 0.9, 0.99),
        ),
        Panel(
            "Calls, p99",
            "By method; a stream lasts as long as its client wants.",
            "s",
            (
                Query(
                    f"histogram_quantile(0.99, {rate('ferrule_rpc_seconds_bucket', 'rpc, le')})",
                    "{{rpc}}",
                ),
            ),
            is_logarithmic=True,
        ),
        Panel(
            "Steps by their time",
            "Two bands are decodes alone and steps that carry prompts.",
            "s",
            (Query("sum by (le) (increase(ferrule_step_seconds_bucket{}[$__rate_interval]))", "{{le}}"),),
            "heatmap",
            12,
        ),
        Panel(
            "In one step",
            "Rows are tokens; sequences are those that move. More per step is more for the same time.",
            "short",
            (
                Query(mean("ferrule_step_rows"), "rows, mean"),
                Query(mean("ferrule_step_sequences"), "sequences, mean"),
                *(Query(query.expression, "rows, p99") for query in quantiles("ferrule_step_rows", 0.99)),
            ),
            width=12,
        ),
    ),
    "KV pool": (
        Panel(
            "Blocks",
            "Used by sequences, cached for prompts that begin the same, empty. Cached ones are given away when needed.",
            "short",
            (Query("sum by (state) (ferrule_kv_blocks{})", "{{state}}"),),
            is_stacked=True,
        ),
        Panel(
            "Held by sequences",
            "Of each server's pool. Beyond 90 % new prompts are about to be refused.",
            "percentunit",
            (Query("ferrule_kv_usage_ratio{}", "{{instance}}"),),
            thresholds=((0.9, RED),),
            maximum=1,
        ),
        Panel(
            "Sharing",
            "Blocks that several sequences hold, and copies made because one of them wrote.",
            "short",
            (
                Query("sum(ferrule_kv_blocks_shared{})", "shared blocks"),
                Query(rate("ferrule_block_copies_total"), "copies/s"),
            ),
        ),
        Panel(
            "Tokens in the pool",
            "Room of the used blocks, and of all.",
            "short",
            (
                Query('sum(ferrule_kv_blocks{, state="used"} * on (instance) ferrule_kv_block_size_tokens{})', "used"),
                Query("sum(ferrule_kv_blocks_capacity{} * on (instance) ferrule_kv_block_size_tokens{})", "in all"),
            ),
        ),
        Panel(
            "Refused for want of blocks",
            "Nothing is evicted behind anybody's back: the new request is refused.",
            "reqps",
            (Query(rate("ferrule_kv_exhausted_total", "instance"), "{{instance}}"),),
        ),
        Panel("Sequences", "Live, by server.", "short", (Query("ferrule_sequences{}", "{{instance}}"),)),
    ),
    "Prefix cache": (
        Panel(
            "Found",
            "Share of the prompt tokens that were looked up and had not to be run.",
            "percentunit",
            (
                Query(
                    f"{rate('ferrule_prefix_hit_tokens_total')} / {rate('ferrule_prefix_lookup_tokens_total')}", "found"
                ),
            ),
            maximum=1,
        ),
        Panel(
            "Prompt tokens",
            "Looked up, and found.",
            "short",
            (
                Query(rate("ferrule_prefix_lookup_tokens_total"), "looked up/s"),
                Query(rate("ferrule_prefix_hit_tokens_total"), "found/s"),
            ),
        ),
        Panel(
            "Cached blocks given away",
            "Fast, with few hits: the pool is too small to keep prefixes.",
            "short",
            (Query(rate("ferrule_prefix_evictions_total"), "blocks/s"),),
        ),
    ),
    "Handles": (
        Panel(
            "Sequences made and ended",
            "Many that expire are clients that die, or never release.",
            "short",
            tuple(
                Query(rate(f"ferrule_{name}_total"), f"{word}/s")
                for name, word in (
                    ("sequences_created", "made"),
                    ("forks", "forks"),
                    ("truncates", "truncates"),
                    ("released", "released"),
                    ("expired", "expired"),
                )
            ),
        ),
        Panel(
            "Retries and conflicts",
            "Replays were answered without running anything twice; conflicts are appends to a state that is gone.",
            "short",
            tuple(
                Query(rate(f"ferrule_{name}_total"), f"{name}/s")
                for name in ("replays", "recomputed", "joined", "conflicts")
            ),
        ),
        Panel(
            "Kept for clients",
            "Ids of sequences that ended, so that their handles get the right answer; registered token masks.",
            "short",
            (
                Query("sum(ferrule_tombstones{})", "tombstones"),
                Query("sum(ferrule_token_masks{})", "token masks"),
            ),
        ),
    ),
    "Durable handles": (
        Panel(
            "Journal",
            "1 while records reach the disk. Servers without --durable have no journal.",
            "short",
            (Query("ferrule_durable_healthy{}", "{{instance}}"),),
        ),
        Panel(
            "Syncs to the disk",
            "A reply about a durable sequence waits for the sync of its step.",
            "s",
            quantiles("ferrule_durable_sync_seconds", 0.5, 0.99),
        ),
        Panel(
            "After a restart",
            "Sequences without KV, and the tokens to compute before these are as fast as others.",
            "short",
            (
                Query("sum(ferrule_durable_sequences{})", "durable"),
                Query("sum(ferrule_durable_cold_sequences{})", "cold"),
                Query("sum(ferrule_durable_tokens_to_recompute{})", "tokens to recompute"),
            ),
        ),
        Panel(
            "Written",
            "Snapshots make it jump.",
            "binBps",
            (Query(rate("ferrule_durable_written_bytes_total"), "bytes/s"),),
        ),
        Panel(
            "Size of the journal",
            "Compaction begins when what was written since the last snapshot is larger than it, and than 16 MiB.",
            "bytes",
            (Query("ferrule_durable_directory_bytes{}", "{{instance}}"),),
        ),
        Panel(
            "Failures and snapshots",
            "A write or sync that failed, and complete snapshots.",
            "short",
            (
                Query(rate("ferrule_durable_failures_total"), "failures/s"),
                Query(rate("ferrule_durable_snapshots_total"), "snapshots/s"),
            ),
        ),
    ),
    "Executor": (
        Panel(
            "Servers",
            "What each runs on; a reason says why the kernels of a GPU do not run.",
            "short",
            (
                Query(
                    "ferrule_info{} * on (instance) group_left (executor, fallback_reason) ferrule_executor_active{}",
                    "",
                    is_table=True,
                ),
            ),
            "table",
            24,
            5,
        ),
        Panel(
            "Steps",
            "By the way they were started: on a GPU many that are launched kernel by kernel have no graph.",
            "short",
            (Query(rate("ferrule_steps_total", "path"), "{{path}}"),),
        ),
        Panel(
            "Jobs",
            "With rows in the newest step, and waiting for one.",
            "short",
            (Query("sum(ferrule_jobs_running{})", "running"), Query("sum(ferrule_jobs_waiting{})", "waiting")),
        ),
        Panel(
            "Drafts accepted",
            "Share of the tokens that clients' drafts brought. Low: shorter drafts.",
            "percentunit",
            (
                Query(
                    f"{rate('ferrule_accepted_tokens_total')} / {rate('ferrule_draft_tokens_total')}",
                    "accepted",
                ),
            ),
            maximum=1,
        ),
        Panel(
            "Memory",
            "By use, and of the whole process.",
            "bytes",
            (
                Query("sum by (kind) (ferrule_memory_bytes{})", "{{kind}}"),
                Query('sum(process_resident_memory_bytes{, job="ferrule"})', "process"),
                Query("sum(ferrule_token_mask_bytes{})", "token masks"),
            ),
        ),
        Panel(
            "Processor",
            "Cores in use by each server.",
            "short",
            (Query('rate(process_cpu_seconds_total{, job="ferrule"}[$__rate_interval])', "{{instance}}"),),
        ),
        Panel(
            "Queued ahead",
            "On a GPU: steps queued before the last ones were read, and rows of these that nobody wanted.",
            "short",
            (
                Query(rate("ferrule_queued_steps_total"), "steps/s"),
                Query(rate("ferrule_discarded_rows_total"), "rows discarded/s"),
            ),
        ),
    ),
    "Envoy": (
        Panel(
            "Requests to servers",
            "By cluster: one for new prompts, one for the handles of each server.",
            "reqps",
            (
                Query(
                    "sum by (envoy_cluster_name) (rate(envoy_cluster_upstream_rq_total[$__rate_interval]))",
                    "{{envoy_cluster_name}}",
                ),
            ),
        ),
        Panel(
            "Servers for new prompts",
            "That Envoy knows, and that it holds healthy; one that drains serves its handles and gets no prompts.",
            "short",
            (
                Query("envoy_cluster_membership_total", "{{envoy_cluster_name}}: known"),
                Query("envoy_cluster_membership_healthy", "{{envoy_cluster_name}}: healthy"),
            ),
        ),
        Panel(
            "Under way",
            "Streams and calls through Envoy.",
            "short",
            (Query("sum by (envoy_cluster_name) (envoy_cluster_upstream_rq_active)", "{{envoy_cluster_name}}"),),
        ),
    ),
}
