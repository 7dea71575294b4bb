"""Whether a setting names a bundle of kernels; asked on machines without a GPU too, so it imports no torch."""

from __future__ import annotations

from pathlib import Path

from ferrule_server.errors import ConfigError
from ferrule_server.kernels.cuda.toolchain.bundle import Bundle, BundleError

__all__ = ["check_bundle_file"]


def check_bundle_file(path: Path) -> None:
    """Refuse a file that is no bundle, used or not: a typing error would show first where there is a GPU.

    Raises:
        ConfigError: It is not there, or is none.
    """
    try:
        Bundle.open(path)
    except BundleError as error:
        raise ConfigError(f"--kernel-bundle: {error}") from error
