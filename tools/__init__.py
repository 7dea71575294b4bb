"""Programs for those who work on Ferrule. Nothing here is packaged, and the server and the client import none of it.

code_lines.py    counts code lines, for the budget in tests/test_architecture.py
cuda_simulator/  runs GPU kernels in Python, thread by thread, and finds races
gpu/             tries the kernels on a GPU (make test-gpu)
compose/         reads the compose files; runs Envoy with the shipped configuration
browser.py       a headless Chromium, for the page's tests and pictures
"""
