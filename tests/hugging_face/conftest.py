"""Tests of spattn.transformers; a folder of that name would be imported in place of the library."""

import pytest


@pytest.fixture(autouse=True)
def registered():
    """spattn is registered; models this small are quicker on one thread."""
    torch = pytest.importorskip("torch")
    hf = pytest.importorskip("transformers")
    pytest.importorskip("spattn.transformers").register()
    hf.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
