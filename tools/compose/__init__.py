"""The compose stack without Docker.

compose_file.py  compose files as ``docker compose config`` reads them
stack.py         runs the services of docker-compose.yml as processes
envoy.py         a real Envoy with the shipped configuration
"""
