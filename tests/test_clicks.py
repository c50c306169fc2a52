"""A reader who knows another library finds a task in two clicks from the first page, by words that the reader knows."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

DOCS = Path(__file__).parents[1] / "docs"
DOC = re.compile(r":doc:`(?:[^`<]*<)?([\w/.-]+)>?`|^ *:link: ([\w/.-]+)$", re.MULTILINE)
REF = re.compile(r":ref:`(?:[^`<]*<)?([\w-]+)>?`")
LABEL = re.compile(r"^\.\. _([\w-]+):", re.MULTILINE)


class Task(NamedTuple):
    """What a reader looks for in the rows, cards and paragraphs of each page, and what the last page must say."""

    reader: str
    clicks: tuple[str, ...]
    answer: str


TASKS = [
    Task("FlexAttention", ("mask_mod",), "from_mask_mod(mask_mod)"),
    Task("FlexAttention", ("BlockMask",), "from_block_mask(block_mask)"),
    Task("FlexAttention", ("score_mod",), "from_score_mod(score_mod)"),
    Task("FlexAttention", ("FlexAttention", "write_a_pattern"), "def allows(self, q, k)"),
    Task("NATTEN", ("NATTEN",), "Neighborhood((64, 64), 13)"),
    Task("NATTEN", ("kernel_size",), "from_natten(grid, kernel_size"),
    Task("Swin", ("Swin",), "windowed((64, 64), 8, shift=4)"),
    Task("DeepSpeed", ("DeepSpeed",), "from_deepspeed(config)"),
    Task("DeepSpeed", ("sparse_attention",), "deepspeed.bslongformer("),
    Task("Hugging Face", ("Trainer",), "Trainer(model=model"),
    Task("Hugging Face", ("Hugging Face",), "spattn.transformers.use(model)"),
    Task("Hugging Face", ("Hugging Face Transformers", "windows"), "``sliding_window`` W of causal decoders"),
    Task("Hugging Face", ("cache",), "spattn.KVCache("),
    Task("Hugging Face", ("dropout",), "dropout_p="),
    Task("FlashAttention", ("cu_seqlens",), "Documents.from_cu_seqlens(cu_seqlens)"),
    Task("sparse models", ("Top-k",), "KeyBlocks(chosen, 64, 64)"),
    Task("JAX", ("JAX",), "jax.jit"),
    Task("context parallelism", ("Many GPUs",), "torchrun"),
    Task("SPLAT", ("grew out of", "SPLAT"), "index_set.py::AffineRows"),
    Task("Megatron-LM", ("grew out of", "Megatron-LM"), "examples/hybrid_block.py"),
    Task("anyone", ("position bias",), "alibi"),
    Task("anyone", ("slow",), "spattn.explain(q, k, v, pattern)"),
    Task("anyone", ("same bits",), "number of threads"),
]


def source(page):
    """The text of a page by its name."""
    (file,) = (file for suffix in (".rst", ".md") if (file := DOCS / f"{page}{suffix}").is_file())
    return file.read_text(encoding="utf-8")


def pages():
    files = (file for file in DOCS.rglob("*") if file.suffix in (".rst", ".md"))
    named = [file.relative_to(DOCS).with_suffix("").as_posix() for file in files if file.name != "README-build.md"]
    return [name for name in named if "generated" not in name and not name.startswith("_")]


LABELS = {label: page for page in pages() for label in LABEL.findall(source(page))}


def blocks(text):
    """Rows of tables, cards and paragraphs: what a reader sees around a link."""
    return re.split(r"\n\n(?! {6})|\n   \* - ", text)


def resolved(page, target):
    """The page that ``:doc:`` means."""
    if target.startswith("/"):
        return target[1:]
    return Path(DOCS, page).parent.joinpath(target).resolve().relative_to(DOCS.resolve()).as_posix()


def links(page, words):
    """The pages to which blocks with these words lead; the case of letters does not matter."""
    for block in blocks(source(page)):
        if words.lower() in block.lower():
            yield from (resolved(page, a or b) for a, b in DOC.findall(block))
            yield from (LABELS[label] for label in REF.findall(block) if label in LABELS)


def test_links_are_found():
    assert "tutorials/jax" in links("index", "JAX") and "quickstart" not in links("index", "JAX")
    assert "gallery/index" in links("index", "DeepSpeed") and set(links("index", "no such words")) == set()


@pytest.mark.parametrize("task", TASKS, ids=lambda task: f"{task.reader}: {task.answer}")
def test_two_clicks(task):
    assert len(task.clicks) <= 2
    here = {"index"}
    for words in task.clicks:
        here = {target for page in here for target in links(page, words)}
        assert here, words
    assert [page for page in here if task.answer in source(page)], f"{task.answer!r} is on none of {sorted(here)}"


def test_readers_and_tasks():
    assert {"FlexAttention", "NATTEN", "DeepSpeed", "Hugging Face"} <= {task.reader for task in TASKS}
    assert len(TASKS) >= 15


def test_cards_lead_to_tutorials():
    cards = re.findall(r"grid-item-card:: (.+)\n +:link: (\S+)\n", source("index"))
    assert len(cards) == 9 and all(target in pages() for _, target in cards)


def test_every_page_is_in_a_table_of_contents():
    """Else a reader cannot browse to it."""
    found = {"index", "gallery/generated", "api/generated"}
    for page in pages():
        text = source(page)
        trees = re.findall(
            r"^\.\. toctree::\n(.*?)(?=\n\S|\Z)|^```\{toctree\}\n(.*?)^```", text, re.DOTALL | re.MULTILINE
        )
        for line in (line.strip() for tree in trees for line in "".join(tree).splitlines()):
            if line and line[0] != ":":
                found |= {x for x in pages() if Path(x).match(resolved(page, line))}
    assert set(pages()) <= found
