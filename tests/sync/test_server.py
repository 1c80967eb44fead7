"""Starting and stopping a server, with a stand-in for the interpreter of its environment."""

import os
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from logra_jax.errors import UserError
from logra_jax.sync.server import EXTENSION, Server, command, environment, vllm_version

STAND_IN = f"""#!{sys.executable}
import http.server, os, subprocess, sys, time
print(*sys.argv[1:], flush=True)
print(os.environ["VLLM_SERVER_DEV_MODE"], os.environ["MINE"], os.environ.get("JAX_PLATFORMS"), flush=True)
shown = os.environ["PYTHONPATH"]
print(sorted(os.listdir(shown)), os.path.realpath(shown + "/logra_jax"), flush=True)
if "die" in sys.argv:
    sys.exit("ValueError: not such a model")
if "mute" in sys.argv:
    time.sleep(60)
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)  # a worker
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def start(tmp_path):
    """Makes a server that has the stand-in for its interpreter."""
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    def make(**options) -> Server:
        settings = {"variables": {"MINE": "1"}, "start_seconds": 30.0} | options
        return Server(tmp_path / "python", tmp_path / "model", tmp_path / "log", **settings)

    return make


def test_runs_inside_the_context_alone(start) -> None:
    with start(options={"more": ["--enforce-eager"], "dtype": "float32"}) as server:
        server.check()
        assert server.client.healthy()
        process = server._process
        package = Path(server._package.name)
    assert process.returncode is not None
    assert not server.client.healthy()
    assert not package.exists()
    server.stop()  # once more does no harm
    line, variables, shown, worker = server.log.read_text().splitlines()[:4]
    assert line.startswith("-m vllm.entrypoints.openai.api_server --enable-scale-out --model /")
    assert line.endswith("--enforce-eager")
    assert variables == "1 1 None"
    assert shown == f"['logra_jax'] {Path(__file__).parents[2] / 'logra_jax'}"
    wait_for_the_end_of(int(worker))


def wait_for_the_end_of(process: int) -> None:
    end = time.monotonic() + 10
    while running(process) and time.monotonic() < end:
        time.sleep(0.01)
    assert not running(process)


def running(process: int) -> bool:
    """Whether it runs; what has ended may wait for somebody who asks how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_server_that_ends_is_quoted(start) -> None:
    with pytest.raises(UserError, match=r"ended with code 1 before it answered; see .*\nValueError: not such a model"):
        start(options={"more": ["die"]}).__enter__()


def test_a_port_in_use_is_named(start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1 cannot be used.*give another"):
            start(port=port)


def test_bad_paths_are_named(start, tmp_path) -> None:
    with pytest.raises(UserError, match="name the python of an environment with vLLM"):
        Server(tmp_path / "nothing", tmp_path / "model", tmp_path / "log")
    with pytest.raises(UserError, match=r"has no config\.json"):
        Server(sys.executable, tmp_path, tmp_path / "log")


def test_what_the_client_relies_on_is_asked_for() -> None:
    line = command("python", "folder", 8000, tensor_parallel=2, max_length=512)
    pairs = dict(pairwise(line))
    assert pairs["--logprobs-mode"] == "processed_logprobs"
    assert pairs["--generation-config"] == "vllm"
    assert pairs["--worker-extension-cls"] == EXTENSION
    assert (pairs["--host"], pairs["--tensor-parallel-size"], pairs["--max-model-len"]) == ("127.0.0.1", "2", "512")


def test_a_server_on_a_cpu_leaves_memory_to_others(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert environment(tmp_path)["VLLM_CPU_KVCACHE_SPACE"] == "1"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    assert environment(tmp_path)["VLLM_CPU_KVCACHE_SPACE"] == "7"


def test_an_environment_without_vllm_is_told(tmp_path) -> None:
    with pytest.raises(UserError, match=r"has no vLLM.*scripts/install_vllm_cpu.sh"):
        vllm_version(sys.executable)
    for text, found in (("echo 0.32.0+cpu", "0.32.0+cpu"), ("exit 3", None), ("echo", None)):
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{text}\n")
        python.chmod(0o755)
        if found:
            assert vllm_version(python) == found
        else:
            with pytest.raises(UserError, match="has no vLLM"):
                vllm_version(python)


def test_started_again_at_its_port_and_quoted_from_there_on(start) -> None:
    with start() as server:
        process, port = server._process, server.port
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with pytest.raises(UserError, match="ended with code -9"):
            server.check()
        with server.log.open("a") as log:
            log.write("ValueError: earlier\n")
        earlier = server.log.read_text()
        server.restart()
        assert server.client.healthy()
        assert (server.port, server._process.pid != process.pid) == (port, True)
        assert server.log.read_text().startswith(earlier)
        assert "ValueError: earlier" not in server._last_words()


def test_ends_with_a_trainer_that_is_killed(start, tmp_path) -> None:
    start()  # makes the stand-in
    trainer = f"""
import sys, time
from pathlib import Path
from logra_jax.sync.server import Server
with Server({str(tmp_path / "python")!r}, {str(tmp_path / "model")!r}, Path({str(tmp_path / "log")!r}),
            variables={{"MINE": "1"}}) as server:
    print(server._process.pid, flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", trainer], stdout=subprocess.PIPE, text=True) as process:
        keeper = int(process.stdout.readline())
        worker = int((tmp_path / "log").read_text().splitlines()[3])
        assert running(keeper)
        assert running(worker)
        process.kill()
    wait_for_the_end_of(keeper)
    wait_for_the_end_of(worker)


def test_a_start_can_be_interrupted(start) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    server = start(interrupt=interrupt, options={"more": ["mute"]})
    with pytest.raises(KeyboardInterrupt):
        server.__enter__()
    assert server._process is None
