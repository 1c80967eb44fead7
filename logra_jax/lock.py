"""Keeps a second run off the folder that one writes to."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from logra_jax.errors import UserError

LOCK = ".lock"


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Lock `folder`, which is made if need be, by a file in it. The lock ends with this process, however that ends.

    At the end the file is deleted, and folders that were made are, too, if they are still empty. A process that is
    killed leaves the file, which then means nothing. Raises UserError where another one holds it, or where it cannot
    be made.
    """
    try:
        made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
        file = _take(folder)
    except BlockingIOError:
        raise UserError(
            f"another run writes to out={folder}: choose another folder, or wait until that run has ended (if its "
            f"machine has died and a network disk still keeps its lock: delete {folder / LOCK})"
        ) from None
    except OSError as error:
        raise UserError(f"out={folder} cannot be written: {error}") from error
    with file:
        try:
            yield
        finally:
            with suppress(OSError):
                (folder / LOCK).unlink()
                for empty in made:
                    empty.rmdir()


def _take(folder: Path) -> IO[str]:
    """The file, locked if the file system has locks. Raises BlockingIOError if another process has it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise
        except OSError:
            return file
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / LOCK)):
                return file
        file.close()  # a run that has just ended deleted it after it was opened here: others would lock a new one
