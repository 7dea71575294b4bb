"""From results to messages.

outputs.py    appends, verifies, forks, releases; the path of every decoded token
describe.py   ModelInfo, ExecutorCapabilities, ExecutorStatus
view.py       GetServerView
block_map.py  the block pool in bytes, for the view
"""
