"""Appends: from a job to committed tokens, and the operations that need no step.

lanes.py      one job at a time on each sequence; the others wait in order of arrival; forks and truncates
admission.py  judges a job by the append rule and reserves all that it needs
cold.py       computes restored sequences before the first append that needs their KV
running.py    RunningAppend: an append in flight
rows.py       what each of its rows returns, and which drafts are accepted
commits.py    makes a finished append part of its sequence
records.py    results kept for retries of appends
creations.py  sequences created for each request_id, kept for retries
endings.py    releases sequences, and notifies every part that keeps data on them
"""
