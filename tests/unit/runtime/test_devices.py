"""No operation mixes tensors of the device and of the host: main paths on a device that is played on a CPU."""

import functools
from collections import Counter

import pytest
import torch
from helpers.families import make_model
from helpers.models import DEFAULT, make_dataset, run_oneshot, save_model
from helpers.played_device import DEVICE, PlayedTensor, play_device
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from eval.coverage import make_config
from eval.groups import find_groups
from struprune_plugin import StruPruneModifier
from struprune_plugin.layerwise.calls import LayerCall
from struprune_plugin.layerwise.capture import ConsumerBatch
from struprune_plugin.layerwise.dense_reference import TARGETS
from struprune_plugin.layerwise.moments import add_batch, assemble_moments, make_sums
from struprune_plugin.layerwise.statistics import LayerStatistics, Stack
from struprune_plugin.linalg.elimination import eliminate_units
from struprune_plugin.linalg.rotation import find_directions
from struprune_plugin.linalg.second_moments import accumulate_moments, make_moments, move_moments
from struprune_plugin.linalg.solve import damp_moments
from struprune_plugin.model.experts import linearize_experts
from struprune_plugin.model.layers import count_parameters, count_weight_bytes, find_decoder_layers
from struprune_plugin.model.structure.tiny import build_tiny
from struprune_plugin.modifiers import needs
from struprune_plugin.pruning.problem import GroupProblem
from struprune_plugin.runtime.device_context import DeviceContext
from struprune_plugin.runtime.residence import HostBuffers

SMALL = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2}  # every operation is played in Python
SIZES_OF = {
    "opt": {"word_embed_proj_dim": 16, "ffn_dim": 20},
    "llama": {"num_key_value_heads": 2, "intermediate_size": 20},
    "qwen3_moe": {"num_key_value_heads": 2, "moe_intermediate_size": 16},
}
COUNTED = {"importance": "wanda"}  # what goes to the device is the same for every importance
FFN_ADMM = {"attention_unit": "none", "weight_update": {"method": "admm", "steps": 1}}
MANY = {"dataset": make_dataset(8, 16), "num_calibration_samples": 8, "batch_size": 4}
PATHS = {
    "default": ("opt", DEFAULT),
    "default, with room": ("llama", DEFAULT),
    "offload": ("llama", {"offload": True}),
    "mixture": ("qwen3_moe", MANY | {"experts": "channels"}),
    "whole experts": ("qwen3_moe", MANY),
    "ADMM": ("opt", {"attention_unit": "head", "weight_update": {"method": "admm", "steps": 1, "inner_steps": 1}}),
    "gated ADMM": ("llama", FFN_ADMM),
    "magnitude": ("llama", {"importance": "magnitude", "allocation": "softmax_inverse", "attention_unit": "head"}),
    "closed form": ("opt", {**FFN_ADMM, "importance": "closed_form", "sparsity": 0.1}),
}
SIZES = {"dataset": make_dataset(4, 16), "num_calibration_samples": 4, "batch_size": 2, "sparsity": 0.3}


@pytest.fixture(scope="module")
def save_short(tmp_path_factory):
    """A function that saves, once, a tiny model of two layers, to be read only."""

    @functools.cache
    def save(model_type):
        return str(
            save_model(make_model(model_type, **SMALL, **SIZES_OF[model_type]), tmp_path_factory.mktemp(model_type))
        )

    return save


@pytest.fixture(scope="module")
def save_deep(tmp_path_factory):
    """A function that saves, once, a tiny LLaMA of some layers, to be read only."""

    @functools.cache
    def save(layers):
        sizes = {**SMALL, **SIZES_OF["llama"], "num_hidden_layers": layers}
        return str(save_model(make_model("llama", **sizes), tmp_path_factory.mktemp("deep")))

    return save


@pytest.mark.parametrize("name", PATHS)
def test_no_operation_mixes_sides_and_the_result_is_the_hosts(save_short, name, monkeypatch):
    model_type, changes = PATHS[name]
    monkeypatch.setattr(needs, "find_free_bytes", lambda: 1 << 40 if "room" in name else None)
    fields = {"model": save_short(model_type), **SIZES, **changes}
    pruned = run_oneshot(**fields)
    expected, sizes = pruned.state_dict(), (count_parameters(pruned), count_weight_bytes(pruned))
    with play_device() as played:
        pruned = run_oneshot(**fields)
        found = pruned.state_dict()
        counted = (count_parameters(pruned), count_weight_bytes(pruned))
    assert counted == sizes, "tied weights are offloaded one by one, and count once"
    assert played.num_operations > 1000
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert value.shape == expected[key].shape, key
        torch.testing.assert_close(value.cpu(), expected[key], rtol=1e-3, atol=1e-3, msg=key)


@pytest.mark.parametrize("offload", [False, True])
def test_layers_that_compute_in_float32_mix_no_sides(save_short, offload):
    """Also in the sensitivity's backward pass and at the head, which is on the host with ``offload``."""
    fields = {**DEFAULT, "sparsity": 0.3, "precision": "float32", "offload": offload}
    data = {name: value for name, value in SIZES.items() if name != "sparsity"}
    run = {"model": save_short("llama"), "precision": "bfloat16", **data}
    expected = run_oneshot(recipe=StruPruneModifier(**fields), **run).state_dict()
    with play_device():
        found = run_oneshot(recipe=StruPruneModifier(**fields), **run).state_dict()
    for key, value in found.items():
        assert value.dtype is torch.bfloat16
        torch.testing.assert_close(value.cpu(), expected[key], rtol=0.02, atol=0.02, msg=key)


def test_the_played_device_refuses_what_a_card_refuses():
    host = torch.ones(3)
    with play_device():
        device = torch.ones(3, device=DEVICE)
        assert (device + torch.tensor(2.0)).device == DEVICE
        assert device[torch.tensor([0, 2])].device == DEVICE
        assert device.cpu().device.type == "cpu"
        for mix in (
            lambda: device + host,
            lambda: host.add_(device.sum()),
            lambda: host[torch.tensor([0], device=DEVICE)],
            lambda: device.index_copy(0, torch.tensor([0]), device[:1]),
            lambda: torch.stack([host, device]),
            lambda: torch.equal(host, device),
        ):
            with pytest.raises(AssertionError, match="on one side"):
                mix()


@pytest.mark.parametrize("offload", [False, True])
def test_moments_are_where_systems_are_solved(save_short, offload):
    model = AutoModelForCausalLM.from_pretrained(save_short("llama"))
    layer, group = find_decoder_layers(model)[0][1], find_groups(model, "value_channels")[-1]
    inputs, target = torch.randn(8, group.num_columns), torch.randn(8, 16)
    with play_device():
        call = LayerCall(torch.zeros(2, 4, 16), {}, torch.ones(2, 4).bool(), DEVICE)
        context, batch = (
            DeviceContext(offload),
            ConsumerBatch(*(part.to(DEVICE) for part in (inputs, inputs, target)), call),
        )
        sums = make_sums(layer, group, DEVICE, context, hold_out=True)
        add_batch(sums, batch, context, num_before=3)
        found = assemble_moments(layer, [group], [sums], context).select(0)
    side = torch.device("cpu") if offload else DEVICE
    assert found.all.gram.device == found.held.gram.device == found.all.target_energy.device == side
    expected = make_moments(torch.empty(16, group.num_columns + 1))
    accumulate_moments(expected, inputs, target)
    with play_device():
        torch.testing.assert_close(found.all.gram.cpu(), expected.gram)


class CopiesOfSize(TorchDispatchMode):
    """Counts the new tensors of so many numbers that the played device gets, by dtype."""

    def __init__(self, size):
        super().__init__()
        self.size, self.counts = size, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, PlayedTensor) and result.numel() == self.size:
            read = {part.data_ptr() for part in args if isinstance(part, PlayedTensor)}
            self.counts[result.dtype] += result.data_ptr() not in read
        return result


@torch.no_grad()
def test_a_stack_of_experts_is_copied_once_on_its_way_to_the_problem():
    """Its moments are assembled, and damped in float64: nothing is unstacked and stacked again."""
    model = build_tiny(make_config("mixtral", 2))
    linearize_experts(model)
    groups = [group for group in find_groups(model, "none", prune_experts=True) if group.layer_index == 0]
    (_, layer), *_ = find_decoder_layers(model)
    num_columns, width = groups[0].num_columns, model.config.hidden_size
    with play_device():
        call = LayerCall(torch.zeros(2, 4, width), {}, torch.ones(2, 4).bool(), DEVICE)
        context = DeviceContext()
        sums = [make_sums(layer, group, DEVICE, context) for group in groups]
        for each in sums:
            inputs, target = (torch.randn(8, size).to(DEVICE) for size in (num_columns, width))
            add_batch(each, ConsumerBatch(inputs, inputs, target, call, counts=[4, 4]), context)
        stack = Stack(layer, groups, LayerStatistics(TARGETS["local"], context))
        with CopiesOfSize(len(groups) * (num_columns + 1) ** 2) as copies:
            ((part, moments),) = stack.split(assemble_moments(layer, groups, sums, context))
            problem = GroupProblem.pose(part, moments, 0.01)
        assert problem.damped.gram.shape == (len(groups), num_columns + 1, num_columns + 1)
    assert len(groups) > 1
    assert copies.counts == {torch.float32: 1, torch.float64: 1}


@pytest.mark.parametrize(
    "eliminate",
    [
        lambda damped: eliminate_units(damped, 1, "x").scores,
        lambda damped: find_directions(damped, 4, 1, "x").scores,
    ],
)
def test_an_elimination_takes_no_more_operations_for_more_units(eliminate):
    counts = []
    for units in (64, 192):
        moments = make_moments(torch.empty(8, units + 1, dtype=torch.float64))
        accumulate_moments(moments, torch.randn(1024, units), torch.randn(1024, 8))
        damped = damp_moments(moments, torch.zeros(8, units + 1, dtype=torch.float64), 0.01)
        with play_device() as played:
            found = eliminate(move_moments(damped, lambda part: part.to(DEVICE)))
            assert found.device == DEVICE
        torch.testing.assert_close(found.cpu(), eliminate(damped))
        counts.append(played.num_operations)
    assert counts[0] == counts[1]


@pytest.fixture
def allocated(monkeypatch):
    """Sizes of the buffers on the host that were allocated."""
    sizes, allocate = [], HostBuffers.allocate
    monkeypatch.setattr(HostBuffers, "allocate", lambda self, size: (sizes.append(size), allocate(self, size))[1])
    return sizes


def test_what_is_parked_comes_back_and_its_buffer_is_used_again(allocated):
    context, tensor = DeviceContext(), torch.randn(4, 8, dtype=torch.bfloat16)
    with play_device():
        held = context.offload(tensor.to(DEVICE))
        other = context.offload(tensor.to(DEVICE) + 1)
        assert held.device.type == "cpu"
        assert torch.equal(context.to_device(held, DEVICE).cpu(), tensor)
        assert torch.equal(context.to_device(held[1:3], DEVICE).cpu(), tensor[1:3])
        context.discard(held)
        context.offload(-tensor.to(DEVICE).view(8, 4))
        assert torch.equal(other, tensor + 1)
        assert allocated == [64, 64]
        context.on_device = {"states": 64}
        assert context.offload(tensor.to(DEVICE)).device == DEVICE
        assert context.offload(tensor.to(DEVICE), "variables").device.type == "cpu"
    host = torch.ones(3, requires_grad=True)
    assert DeviceContext().offload(host).data_ptr() == host.data_ptr()
    assert not DeviceContext().offload(host).requires_grad


def run_played(save_short, num_samples, **fields):
    data = {"dataset": make_dataset(num_samples, 16), "num_calibration_samples": num_samples, "batch_size": 1}
    with play_device() as played:
        run_oneshot(save_short("llama"), sparsity=0.3, **data, **fields)
    return played


def test_what_fits_stays_on_the_device(save_short, monkeypatch, allocated):
    """More text costs its tokens' way to the device, neither that of their states in every layer nor the embeddings'."""
    few, many = (run_played(save_short, number, **COUNTED).bytes_in for number in (4, 8))
    assert allocated
    allocated.clear()
    monkeypatch.setattr(needs, "find_free_bytes", lambda: 1 << 40)
    kept = [run_played(save_short, number, **COUNTED).bytes_in for number in (4, 8)]
    assert not allocated
    assert kept[1] - kept[0] < 0.2 * (many - few)


def test_neither_waits_nor_buffers_grow_with_batches_times_layers(save_deep, allocated):
    grown, sizes = [], []
    for layers in (2, 3):
        waits = [run_played(lambda _, n=layers: save_deep(n), number, **COUNTED).num_waits for number in (4, 6)]
        grown.append(waits[1] - waits[0])
        sizes.append(sorted(allocated))
        allocated.clear()
    assert max(grown) <= 12, "two more batches are recognised on their way in; then only choices wait"
    assert sizes[0] == sizes[1], "layers after the first write into the same buffers"
