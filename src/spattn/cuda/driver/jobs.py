"""Compilations in threads that wait for nvcc; calls that need the same kernel share one."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from ..._util.limits import processors

__all__ = ["find", "run", "start"]

_SECONDS_TO_END = 5.0  # for threads whose compilers have been killed


class _Job(NamedTuple):
    name: str
    make: Callable[[], bytes]
    image: Future[bytes]


class _Jobs:
    """The compilations of a process: at most as many at once as it may use processors.

    `kept` has those that run or wait, and finished ones whose image or error nobody has asked for yet; `wanted` are the
    names of those that somebody waits for.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kept: dict[str, _Job] = {}
        self.wanted: set[str] = set()
        self.waiting: list[_Job] = []
        self.threads: set[threading.Thread] = set()
        self.processes: set[subprocess.Popen[str]] = set()
        self.ended = False

    def find(self, name: str, wanted: bool) -> Future[bytes] | None:
        """Return the image of a job, or None; the caller holds the lock."""
        job = self.kept.get(name)
        if job is None:
            return None
        if wanted and job.image.done():
            del self.kept[name]
            self.wanted.discard(name)
        elif wanted:
            self.wanted.add(name)
        return job.image

    def add(self, job: _Job, wanted: bool) -> None:
        """Run a job in a thread; the caller holds the lock."""
        if len(self.threads) < processors():
            thread = threading.Thread(target=self._work, name="spattn-nvcc", daemon=True)
            self.threads.add(thread)
            try:
                thread.start()  # it waits for the lock
            except RuntimeError:
                self.threads.remove(thread)
                raise
        self.kept[job.name] = job
        self.waiting.append(job)
        if wanted:
            self.wanted.add(job.name)

    def _work(self) -> None:
        while True:
            with self.lock:
                if not self.waiting:
                    self.threads.discard(threading.current_thread())
                    return
                job = next((job for job in self.waiting if job.name in self.wanted), self.waiting[0])
                self.waiting.remove(job)
            try:
                job.image.set_result(job.make())
            except BaseException as error:
                job.image.set_exception(error)
            with self.lock:
                if job.name in self.wanted and self.kept.get(job.name) is job:
                    self.wanted.remove(job.name)
                    del self.kept[job.name]

    def end(self) -> None:
        """Kill all compilers and the processes that they started, and let the threads remove their files."""
        with self.lock:
            self.ended = True
            self.waiting.clear()
            for process in self.processes:
                _kill(process)
            threads = list(self.threads)
        for thread in threads:
            thread.join(_SECONDS_TO_END)


_jobs = _Jobs()


def find(name: str) -> Future[bytes] | None:
    """Return the image of a job that :func:`start` started; None if there is none, or it has ended and its image or
    error has been returned."""
    with _jobs.lock:
        return _jobs.find(name, True)


def start(name: str, make: Callable[[], bytes], wanted: bool = True) -> Future[bytes]:
    """Return the image of the job `name`, which calls `make` in a thread unless it has been started.

    With `wanted`, as in :func:`find`, the caller waits for the image: the job precedes those that nobody waits for.
    """
    with _jobs.lock:
        found = _jobs.find(name, wanted)
        if found is None:
            job = _Job(name, make, Future())
            _jobs.add(job, wanted)
            found = job.image
        return found


def run(command: list[str], folder: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command without a shell, with temporary files in `folder`; it is killed if this process exits.

    A process group of its own: an interrupt in the terminal ends the wait for a kernel, not its compilation.
    """
    environment = None if folder is None else {**os.environ, "TMPDIR": folder}
    with _jobs.lock:
        if _jobs.ended:
            raise RuntimeError(f"{command[0]}: not run, because the process exits")
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            process_group=0,
        )
        _jobs.processes.add(process)
    try:
        out, err = process.communicate()
    finally:
        with _jobs.lock:
            _jobs.processes.discard(process)
            _kill(process)  # only if communicate() was interrupted
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            os.killpg(process.pid, signal.SIGKILL)


def _forget() -> None:
    """In a forked child, whose threads do not exist and whose parent's compilers belong to the parent."""
    global _jobs
    _jobs = _Jobs()


os.register_at_fork(after_in_child=_forget)
atexit.register(lambda: _jobs.end())
