"""On-disk cache of cubins, one per file, keyed by compiler inputs and verified on read; cubins of the installed wheel.

A file holds the SHA-256 of the cubin, then the cubin. Writes go to a temporary file, then an atomic rename: readers see
a whole file or none.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import warnings
from pathlib import Path

SHIPPED = Path(__file__).parents[1] / "kernels"  # filled by tools/add_kernels.sh
_DIGEST = hashlib.sha256().digest_size


def folder() -> Path:
    """Return the cache directory: ``SPATTN_CACHE_DIR``, else ``spattn`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    chosen = os.environ.get("SPATTN_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spattn"


def require_safe(path: Path) -> None:
    """Raise PermissionError if another user could have written to a folder whose files run on the GPU."""
    status = path.stat()
    if status.st_uid != os.getuid():
        reason = f"it belongs to user {status.st_uid}, not to {os.getuid()}"
    elif status.st_mode & stat.S_IWOTH:
        reason = f"it is world-writable (mode {stat.S_IMODE(status.st_mode):o}); run chmod o-w"
    else:
        return
    raise PermissionError(f"{path}: not safe as a cache of GPU kernels: {reason}, or set SPATTN_CACHE_DIR")


def read(name: str) -> bytes | None:
    """Return the entry `name`, None if missing or corrupt; raise PermissionError if the folder is not safe."""
    place = folder()
    if not place.is_dir():
        return None
    require_safe(place)
    return _verified(place / name)


def shipped(stem: str) -> bytes | None:
    """Return the cubin that the wheel has for a hash of sources and flags; None if it has none, or a corrupt one."""
    return _verified(SHIPPED / stem)


def _verified(path: Path) -> bytes | None:
    try:
        stored = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, content = stored[:_DIGEST], stored[_DIGEST:]
    return content if hashlib.sha256(content).digest() == digest else None


def entry(content: bytes) -> bytes:
    """Return the bytes of the file that stores `content`."""
    return hashlib.sha256(content).digest() + content


def has(name: str) -> bool:
    """Return whether there is an entry `name`, which :func:`read` may find corrupt; raise as it does."""
    place = folder()
    if not place.is_dir():
        return False
    require_safe(place)
    return (place / name).exists()


def write(name: str, content: bytes) -> None:
    """Store an entry; warn if the folder is not writable, raise PermissionError if it is not safe."""
    place = folder()
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        _warn_unwritable(error)
        return
    require_safe(place)
    try:
        handle, temporary = tempfile.mkstemp(dir=place, prefix=name, suffix=".part")
    except OSError as error:
        _warn_unwritable(error)
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(entry(content))
        os.replace(temporary, place / name)
    except BaseException as error:
        os.unlink(temporary)
        if not isinstance(error, OSError):
            raise
        _warn_unwritable(error)


def names(prefix: str) -> list[str]:
    """Return the names of entries that start with `prefix`, newest first."""
    place = folder()
    if not place.is_dir():
        return []
    found = [path for path in place.glob(prefix + "*") if path.suffix != ".part"]
    return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)]


def _warn_unwritable(error: OSError) -> None:
    warnings.warn(
        f"cannot cache compiled GPU kernels: {error}; set SPATTN_CACHE_DIR to a writable folder",
        RuntimeWarning,
        stacklevel=4,
    )
