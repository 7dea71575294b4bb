"""From results to messages.

outputs.py   appends, verifies, forks, releases; every decoded token passes here
describe.py  ModelInfo, ExecutorCapabilities, CallerInfo, ExecutorStatus, CacheMetrics
view.py      GetServerView
times.py     durations and timestamps
"""
