"""Real text: the source of the running Python's standard library."""

from __future__ import annotations

import ast
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MODULES = (
    "argparse.py",
    "ast.py",
    "base64.py",
    "bdb.py",
    "calendar.py",
    "cmd.py",
    "configparser.py",
    "csv.py",
    "dataclasses.py",
    "difflib.py",
    "enum.py",
    "fractions.py",
    "ftplib.py",
    "getpass.py",
    "gettext.py",
    "gzip.py",
    "heapq.py",
    "html/parser.py",
    "imaplib.py",
    "inspect.py",
    "json/decoder.py",
    "locale.py",
    "mailbox.py",
    "pprint.py",
    "queue.py",
    "random.py",
    "sched.py",
    "shutil.py",
    "statistics.py",
    "tarfile.py",
    "threading.py",
    "wave.py",
)
"""Paths in the standard library, present in every supported Python version."""


@dataclass(frozen=True)
class Text:
    """A piece of a module's source: its opening, or one of its functions."""

    module: str
    kind: str
    source: str


def sample(modules: int) -> list[Text]:
    """The opening and one function of each of the first `modules` modules of :data:`MODULES`, in this order."""
    texts: list[Text] = []
    for name, source in _sources():
        if len(texts) == 2 * modules:
            break
        functions = _functions(source)
        if functions:
            texts += [Text(name, "opening", source), Text(name, "function", functions[len(functions) // 2])]
    return texts


def chunks(tokenizer: Any, count: int, length: int) -> np.ndarray:
    """`count` consecutive pieces of `length` tokens of the modules' source, each wrapped in [CLS] and [SEP].

    Returns
    -------
    (count, length) int array
    """
    cls, sep = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    body: list[int] = []
    for _, source in _sources():
        if len(body) >= count * (length - 2):
            break
        body += tokenizer.encode(source, add_special_tokens=False).ids
    inner = np.resize(np.array(body), (count, length - 2))  # repeats the source if it is too short
    return np.concatenate([np.full((count, 1), cls), inner, np.full((count, 1), sep)], axis=1)


def tokenise(tokenizer: Any, texts: list[Text], max_len: int) -> list[np.ndarray]:
    """Token ids of each text, with [CLS] and [SEP], truncated to `max_len` tokens."""
    tokenizer.enable_truncation(max_len)
    encoded = [np.array(e.ids) for e in tokenizer.encode_batch([t.source for t in texts])]
    tokenizer.no_truncation()
    return encoded


def _sources() -> Iterator[tuple[str, str]]:
    folder = Path(sysconfig.get_path("stdlib"))
    for name in MODULES:
        if (folder / name).is_file():
            yield name, (folder / name).read_text(encoding="utf-8")


def _functions(source: str) -> list[str]:
    """Source of the functions and methods, shortest first."""
    lines = source.split("\n")  # the lines of ast; splitlines() also breaks at form feeds
    nodes = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    found = ("\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes)
    return sorted((textwrap.dedent(text) for text in found), key=lambda text: (len(text), text))
