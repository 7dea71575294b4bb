"""Logs, metrics and traces for operators.

call_log.py       log lines
metrics.py        Prometheus metrics, read from the live parts on request
metric_tables.py  names, help texts and sources of the metrics without labels
tracing.py        OpenTelemetry spans
"""
