"""Compiled kernels on disk: one file per cubin, named by what it was made from, checked when it is read.

A file is the SHA-256 of the cubin followed by the cubin. It is written beside its place and moved there in one step, so
a reader sees a whole file or none, whoever else writes.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import warnings
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


def folder() -> Path:
    """Where cubins are kept: ``SPATTN_CACHE_DIR``, else ``spattn`` in the user's cache folder (``XDG_CACHE_HOME``)."""
    chosen = os.environ.get("SPATTN_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spattn"


def require_safe(path: Path) -> None:
    """Raise PermissionError if somebody else could have put files into a folder: they would run on the GPU."""
    status = path.stat()
    if status.st_uid != os.getuid():
        reason = f"it belongs to user {status.st_uid}, not to {os.getuid()}"
    elif status.st_mode & stat.S_IWOTH:
        reason = f"everybody may write to it (mode {stat.S_IMODE(status.st_mode):o}); chmod o-w fixes that"
    else:
        return
    raise PermissionError(f"{path}: not used as cache for GPU kernels, because {reason}; or set SPATTN_CACHE_DIR")


def read(name: str) -> bytes | None:
    """The entry called `name`; None when there is none or it is not what was written.

    Raises
    ------
    PermissionError
        If the folder is not safe to read code from.
    """
    place = folder()
    if not place.is_dir():
        return None
    require_safe(place)
    try:
        stored = (place / name).read_bytes()
    except FileNotFoundError:
        return None
    digest, content = stored[:_DIGEST], stored[_DIGEST:]
    return content if hashlib.sha256(content).digest() == digest else None


def write(name: str, content: bytes) -> None:
    """Keep an entry. Warns where the folder cannot be written to: the next process then compiles again.

    Raises
    ------
    PermissionError
        If the folder exists and is not safe.
    """
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
            file.write(hashlib.sha256(content).digest() + content)
        os.replace(temporary, place / name)
    except BaseException as error:
        os.unlink(temporary)
        if not isinstance(error, OSError):
            raise
        _warn_unwritable(error)


def names(prefix: str) -> list[str]:
    """Entries whose name starts with `prefix`, newest first."""
    place = folder()
    if not place.is_dir():
        return []
    found = [path for path in place.glob(prefix + "*") if path.suffix != ".part"]
    return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)]


def _warn_unwritable(error: OSError) -> None:
    warnings.warn(
        f"compiled GPU kernels are not kept: {error}; set SPATTN_CACHE_DIR to a folder that can be written to",
        RuntimeWarning,
        stacklevel=4,
    )
