"""What all campaigns check beside their own figures."""

from __future__ import annotations

from tests.reasons import reasons_are_documented

__all__ = ["reasons_are_documented"]
