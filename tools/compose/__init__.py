"""What tests and benchmarks use of the compose stack without Docker.

compose_file.py  compose files as ``docker compose config`` reads them
envoy.py         a real Envoy with the shipped configuration
"""
