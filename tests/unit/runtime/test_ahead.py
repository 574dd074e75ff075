"""The next layer's weights come while the one before is worked on: once, unchanged, and only where there is room."""

import pytest
import torch
from compressed_tensors.offload import disable_offloading, disable_onloading
from compressed_tensors.offload.cache import CPUCache, OffloadCache
from compressed_tensors.offload.module import offload_module
from helpers.models import CHEAP, DEFAULT, make_opt, run_oneshot

from eval.account import CountedContext, WeightsAtOnce
from struprune_plugin.model.layers import find_decoder_layers
from struprune_plugin.runtime import residence as ahead
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.residence import WeightsAhead

CPU = torch.device("cpu")


@pytest.fixture
def layers():
    """Decoder layers whose weights lie in the host's caches."""
    model = make_opt()
    for module in model.modules():
        offload_module(module, CPU, CPU)
    return [layer for _, layer in find_decoder_layers(model)]


def list_weights(layer):
    with disable_onloading():
        return [*layer.parameters(), *layer.buffers()]


@pytest.mark.parametrize("kind", [WeightsAhead, WeightsAtOnce])
def test_what_was_fetched_is_what_the_host_uses(layers, kind, monkeypatch):
    asked = []
    onload = CPUCache.onload
    monkeypatch.setattr(
        CPUCache, "onload", lambda cache, offloaded: asked.append(offloaded) or onload(cache, offloaded)
    )
    weights = kind()
    weights.fetch(layers[1])
    weights.fetch(layers[1])
    with disable_offloading():
        weights.take(layers[0])
        assert not OffloadCache.keep_onloaded_values
        weights.take(layers[1])
        assert [id(tensor) for tensor in asked] == [id(tensor) for tensor in list_weights(layers[1])]
        layers[1](torch.randn(1, 4, 24))
        assert len(asked) == len(list_weights(layers[1])), "nothing is loaded twice"


def test_a_weight_that_has_changed_since_is_loaded_anew(layers):
    weights = WeightsAhead()
    weights.fetch(layers[1])
    weights.drop()
    assert weights._coming is None
    weights.fetch(layers[1])
    weights._coming.result()  # it is there before anything changes
    weights._coming.result()  # what changes before that is loaded as it is
    layers[1].fc1.weight = torch.nn.Parameter(torch.zeros(8, 24))
    layers[1].fc2.weight = torch.nn.Parameter(torch.ones(24, 40))  # of the same size: written to where it lies
    with disable_offloading():
        weights.take(layers[1])
        taken = {id(tensor) for tensor in OffloadCache.keep_onloaded_values}
        with disable_onloading():
            left_out = {name for name, tensor in layers[1].named_parameters() if id(tensor) not in taken}
        assert left_out == {"fc1.weight", "fc2.weight"}
        assert layers[1].fc1.weight.shape == (8, 24)
        assert bool((layers[1].fc2.weight == 1).all())


def test_a_device_without_room_leaves_the_loading_to_the_host(layers, monkeypatch):
    def fail(*_args):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(ahead, "load_weights", fail)
    weights = WeightsAhead()
    weights.fetch(layers[1])
    with disable_offloading():
        weights.take(layers[1])
        assert not OffloadCache.keep_onloaded_values
        assert layers[1](torch.randn(1, 4, 24)).isfinite().all()


def test_a_pass_that_fails_leaves_nothing_that_was_fetched(layers):
    context = DeviceContext()

    def fail():
        with context.onload_layer(layers[0], layers[1]):
            assert context._ahead._layer is layers[1]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert context._ahead._layer is None


def test_the_account_counts_both_layers(layers):
    sizes = [sum(tensor.nbytes for tensor in list_weights(layer)) for layer in layers]
    with CountedContext.open() as context, context.stage("both"):
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            with context.onload_layer(layer, following):
                assert all(parameter is not None for parameter in layer.parameters())
    assert context.stages["both"].peak_bytes == sizes[0] + sizes[1]
    with CountedContext.open(offload=True) as context, context.stage("one"), context.onload_layer(layers[0], layers[1]):
        assert all(parameter is not None for parameter in layers[0].parameters())
    assert context.stages["one"].peak_bytes == sizes[0], "the next layer waits"


@pytest.mark.parametrize("fields", [CHEAP, DEFAULT])
def test_every_layer_but_the_first_of_a_pass_is_fetched_ahead(opt, fields, monkeypatch):
    log = []
    fetch, take = WeightsAhead.fetch, WeightsAhead.take
    monkeypatch.setattr(WeightsAhead, "fetch", lambda ahead, layer: (log.append(("fetch", layer)), fetch(ahead, layer)))

    def see(ahead, layer):
        if ahead._layer is layer:
            log.append(("take", layer))
        take(ahead, layer)

    monkeypatch.setattr(WeightsAhead, "take", see)
    model = run_oneshot(str(opt), sparsity=0.3, **fields)
    order = [layer for _, layer in find_decoder_layers(model)]
    passes = sum(what == "take" and layer is order[-1] for what, layer in log)
    fetched = [(what, order.index(layer)) for what, layer in log if layer in order]  # not the rehearsal's
    forward = [pair for index in range(1, len(order)) for pair in (("fetch", index), ("take", index))]
    if fields is CHEAP:
        assert passes == 1
    else:
        assert passes >= 4, "sensitivity, allocation, trials, pruning"
    assert fetched[-len(forward) :] == forward, "the pruning pass comes last"
