"""What all commands share: the command line of a run, exit codes, and the cache of compiled programs."""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from logra_jax import distributed
from logra_jax.config import Config, format_help, load_config
from logra_jax.errors import UserError
from logra_jax.signals import StopFlag
from logra_jax.watchdog import Watchdog

MEMORY_FRACTION = 0.95  # the rest is for the context of the GPU and buffers of communication


@dataclass(frozen=True)
class Command:
    """A parsed command line."""

    config: Config
    resume: bool
    overwrite: bool
    dry_run: bool
    folder: Path | None = None


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """A parser of `[--config FILE] [key=value ...]` that prints every key for `--help`."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        epilog=f"settings (key=value):\n{format_help()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; without it, the packaged demo")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings that replace the file's")
    return parser


def parse(argv: Sequence[str] | None, program: str, description: str, trains: bool = True) -> Command:
    """Read `[--config FILE] [--resume] [--overwrite] [--dry-run] [key=value ...]`; None: `sys.argv`.

    trains: whether the command has the flags of a training run; without them they are all False, and there is
    `--out FOLDER`, which becomes `folder`.

    Prints every key for `--help`. Unknown flags leave with code 2; a wrong file or key raises UserError.
    """
    parser = make_parser(program, description)
    parser.set_defaults(resume=False, overwrite=False, dry_run=False, out=None)
    if trains:
        _add_training_flags(parser)
    else:
        parser.add_argument("--out", metavar="FOLDER", type=Path, help="keep the answers and figures in a new folder")
    found = parser.parse_intermixed_args(argv)
    if found.resume and found.overwrite:
        parser.error("--resume keeps what --overwrite deletes: give one of them")
    config = load_config(found.config, found.settings)
    return Command(config, found.resume, found.overwrite, found.dry_run, found.out)


def positive(text: str) -> int:
    """An argument that counts something: at least 1."""
    number = int(text)
    if number < 1:
        raise ValueError  # argparse says which argument, and leaves with code 2
    return number


def _add_training_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="go on from the newest good checkpoint in out/")
    parser.add_argument("--overwrite", action="store_true", help="delete what an earlier run left in out/")
    parser.add_argument("--dry-run", action="store_true", help="check everything and show the set-up; no update")


def run(main: Callable[[], int]) -> None:
    """Call a command and leave with its exit code; a UserError is printed and becomes code 2."""
    try:
        code = main()
    except UserError as error:
        whose = "" if distributed.alone() else f"process {distributed.number()}: "
        print(f"error: {whose}{error}", file=sys.stderr)
        code = distributed.USER_ERROR
        distributed.leave(None, code)
    except Exception as error:
        distributed.leave(error, distributed.FAILED)
        raise
    except SystemExit:  # rich, when nobody reads the output any more
        distributed.leave(None, distributed.FAILED)
        raise
    sys.exit(code)


def begin(config: Config, member: distributed.Member | None, stop: StopFlag, watchdog: Watchdog) -> None:
    """What a command does before it touches a device: meets the other processes of its run, if there are any.

    From here on processes stop together, and only the first one writes to standard output.
    """
    quiet_libraries()
    use_memory(config.mesh.memory_fraction)
    settings = config.processes
    distributed.join(member, join_s=settings.join_s, silent_s=settings.silent_s)
    use_compilation_cache()

    def agree(number: int) -> int:
        watchdog.beat()
        return distributed.largest(number)

    stop.agree = agree
    if not distributed.first():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def quiet_libraries() -> None:
    """Keep the libraries' own reports of what is raised as an error anyway off the terminal."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax, on a full disk


def use_memory(fraction: float | None) -> None:
    """Let JAX take that share of each GPU, nearly all by default; to be called before it touches a device.

    It cannot follow from what the run will need: JAX reads the share when it first touches a device, and compiles
    nothing before. `logra_jax.plan` says when a run needs a larger one.
    """
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the second is what it was called before
    if fraction is None and any(name in os.environ for name in names):
        return
    for name in names:
        os.environ.pop(name, None)  # JAX refuses to be given both
    os.environ[names[0]] = str(MEMORY_FRACTION if fraction is None else fraction)


def use_compilation_cache() -> None:
    """Keep compiled programs between runs, unless JAX_COMPILATION_CACHE_DIR already names a place.

    A program compiled for one processor may use instructions that another lacks, and home folders are shared
    between machines: the folder is therefore named after the processor's features.
    """
    import jax

    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    features = platform.machine() + platform.system()
    if (info := Path("/proc/cpuinfo")).is_file():
        features += next((line for line in info.read_text().splitlines() if line.startswith(("flags", "Features"))), "")
    digest = hashlib.sha256(features.encode()).hexdigest()[:12]
    jax.config.update("jax_compilation_cache_dir", str(home / "logra_jax" / f"xla-{digest}"))
