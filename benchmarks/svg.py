"""What the pictures of the benchmarks share."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["document"]


def document(width: int, height: int, body: Sequence[str]) -> str:
    """Return an SVG of a size with elements on white."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *body, "</svg>"]) + "\n"
