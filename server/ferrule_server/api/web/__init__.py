"""The HTTP side: metrics for Prometheus and a page that shows the server, on threads of its own."""
