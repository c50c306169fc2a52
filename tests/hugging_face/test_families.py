"""Each family of Transformers computes what its eager attention computes, or is refused by name.

A selection runs with every test run, every family that :mod:`families` can make in the nightly run.
"""

import pytest
from hypothesis import settings

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import spattn.transformers  # noqa: E402
from spattn.patterns import SlidingWindow  # noqa: E402
from spattn.transformers import _attention  # noqa: E402

from . import families  # noqa: E402
from .families import run  # noqa: E402

NIGHTLY = settings().max_examples >= settings.get_profile("nightly").max_examples
EQUAL, REFUSED = families.selected(NIGHTLY)
DECODERS = [name for name in EQUAL if families.generates(name)]
CACHES = ["dynamic", "static", "hybrid"]
CLOSE = {"rtol": 1e-4, "atol": 3e-5}
NEW = 6


def pair(name, **options):
    """The family's model with eager attention, and the same after use()."""
    return families.model(name), spattn.transformers.use(families.model(name), **options)


@pytest.fixture
def calls(monkeypatch):
    """The results of spattn's attention in models."""
    found, attention = [], _attention.attention

    def counted(*arguments, **options):
        found.append(attention(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(_attention, "attention", counted)
    return found


@pytest.mark.parametrize("side", ["neither", "left", "right"])
@pytest.mark.parametrize("name", EQUAL)
def test_results_and_gradients(name, side, calls):
    eager, ours = pair(name)
    given = families.inputs(eager)
    if side != "neither" and not families.takes_padding(eager, given):
        pytest.skip("the family has no padding mask of tokens")
    if side != "neither":
        given["attention_mask"] = families.padding(side)
    found = []
    try:
        run(eager, given)
    except families.ERRORS:
        with pytest.raises(families.ERRORS):
            run(ours, given)
        return
    for model in (eager, ours):
        out = run(model, given)
        if side != "neither" and out.shape[:2] == given["attention_mask"].shape and out.ndim == 3:
            out = out if model.config.is_encoder_decoder else out[given["attention_mask"] == 1]
        elif side == "left":
            # A result for a sequence may be that of its first token, which is padding in the first sequence.
            out = out[-1:, -1:] if out.shape == (2, 2) else out[-1:]
        weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
        (out * weights).mean().backward()
        found.append((out.detach(), {name: one.grad for name, one in model.named_parameters()}))
    (want, theirs), (got, mine) = found
    assert calls
    torch.testing.assert_close(got, want, **CLOSE)
    for parameter, gradient in theirs.items():
        if gradient is not None:
            torch.testing.assert_close(mine[parameter], gradient, rtol=1e-3, atol=1e-5, msg=parameter)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", DECODERS)
def test_generation(name, cache, calls):
    """With left padding; a cache that eager attention cannot have is an error here too."""
    eager, ours = pair(name)
    given = families.inputs(eager)
    options = {field: given[field] for field in given if field in ("input_ids", "input_features", "pixel_values")}
    options |= {"max_new_tokens": NEW, "do_sample": False, "use_cache": True, "cache_implementation": cache}
    if "input_ids" in given:
        options["attention_mask"] = families.padding("left")
    try:
        want = eager.generate(**options)
    except families.ERRORS:
        with pytest.raises(families.ERRORS):
            ours.generate(**options)
        return
    assert torch.equal(ours.generate(**options), want) and calls


@pytest.mark.parametrize("name", EQUAL)
def test_autocast(name, calls):
    """As far from the results in float32 as eager attention."""
    eager, ours = pair(name)
    given = families.inputs(eager)
    with torch.no_grad():
        exact = run(eager, given).float()
        with torch.autocast("cpu", torch.bfloat16):
            try:
                theirs = run(eager, given)
            except families.ERRORS:
                with pytest.raises(families.ERRORS):
                    run(ours, given)
                return
            mine = run(ours, given)
    assert calls and mine.dtype == theirs.dtype
    errors = [(x.float() - exact).abs().max().item() for x in (mine, theirs)]
    assert errors[0] <= 2 * errors[1] + 0.004 * exact.abs().max().item(), errors


@pytest.mark.parametrize("name", DECODERS)
def test_a_pattern_reaches_every_layer(name):
    config = families.model(name).config
    if config.is_encoder_decoder or name.startswith("inkling2"):
        with pytest.raises(ValueError, match="^spattn_pattern: must be None for a model with (cross-a|attention over)"):
            pair(name, pattern=SlidingWindow(2, 0))
        return
    eager, ours = pair(name, pattern=SlidingWindow(2, 0))
    given = families.inputs(eager)
    other = given | {"input_ids": given["input_ids"].clone()}
    other["input_ids"][:, -1] = other["input_ids"][:, 0]
    with torch.no_grad():
        dense, dense_of_other, sparse = run(eager, given), run(eager, other), run(ours, given)
        assert not torch.allclose(sparse[:, -1], dense[:, -1], **CLOSE)
        if torch.allclose(dense[:, 0], dense_of_other[:, 0], rtol=0, atol=1e-7):  # causal: three tokens see all before
            torch.testing.assert_close(sparse[:, :3], dense[:, :3], **CLOSE)
        else:  # no token sees the last one
            torch.testing.assert_close(run(ours, other)[:, :-1], sparse[:, :-1], **CLOSE)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    model = families.model(name)
    given = families.inputs(model)
    with pytest.raises((TypeError, ValueError), match=families.REASONS[REFUSED[name]]):
        run(spattn.transformers.use(model), given)
        run(model, given | {"attention_mask": families.padding("right")})


def test_the_table_is_whole():
    """Each family has a row that the sweep found, or is one that nothing tries; no row names what is not there."""
    listed = [name for names in families.table().values() for name in names]
    assert len(listed) == len(set(listed)) and families.table().keys() == {families.EQUAL, *families.REASONS}
    assert set(families.EVERY_RUN) <= set(listed) and len(families.EVERY_RUN) >= 25
    if NIGHTLY:
        assert set(listed) <= set(families.names())
        found = {}
        for name in set(families.names()) - set(listed):
            try:
                made = families.prepared(name)
            except Exception:  # whatever a configuration, a missing package or a model raises: it is not tried
                continue
            found[name] = families.outcome(*made)
        assert not found, "they belong in the table"
