"""Fixtures of the spattn.transformers tests. A folder named `transformers` would shadow the library."""

import pytest


@pytest.fixture(autouse=True)
def registered():
    """Register spattn, and use one thread, the fastest choice for models this small."""
    torch = pytest.importorskip("torch")
    hf = pytest.importorskip("transformers")
    pytest.importorskip("spattn.transformers").register()
    hf.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
