import pytest
import torch
from helpers.models import make_opt

from eval.groups import find_groups
from struprune_plugin.allocation.sensitivity import draw_labels, measure_fisher
from struprune_plugin.linalg.solve import sqrt_psd
from struprune_plugin.model.layers import find_linear
from struprune_plugin.runtime.device_context import DeviceContext


def _make_batch(padded):
    ids = torch.randint(4, 2048, (3, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _naive_fisher(model, batch, groups):
    """Gradients of -log p(y) by autograd through the whole model, the same y."""
    outputs = {}
    handles = []
    for group in groups:
        linear = find_linear(model.get_submodule(group.layer_name), group.consumer)

        def see(_module, _args, output, name=group.name):
            output.retain_grad()
            outputs[name] = output

        handles.append(linear.register_forward_hook(see))
    logits = model(**batch).logits
    kept = batch["attention_mask"].flatten().bool()
    log_probs, probs = torch.log_softmax(logits, -1).flatten(0, 1)[kept], torch.softmax(logits, -1)
    drawn = []
    for i, (sequence, counted) in enumerate(zip(probs.double(), batch["attention_mask"].bool(), strict=True)):
        sequence = sequence[counted]  # so that padding, of whatever length, changes nothing
        draws = torch.rand(len(sequence), generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        drawn += [int((p.cumsum(0) <= u * p.sum()).sum()) for p, u in zip(sequence, draws, strict=True)]
    labels = torch.tensor(drawn)[:, None]
    (-log_probs.gather(1, labels).sum()).backward()
    for handle in handles:
        handle.remove()
    gradients = {name: output.grad.flatten(0, -2)[kept].double() for name, output in outputs.items()}
    return {name: g.T @ g / len(g) for name, g in gradients.items()}


@pytest.mark.parametrize(
    ("unit", "shape", "padded"),
    [("value_channels", {}, True), ("head", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}, False)],
)
def test_measure_fisher_layer_by_layer_equals_whole_model_gradients(unit, shape, padded):
    model = make_opt(**shape)
    groups, batch = find_groups(model, unit), _make_batch(padded)
    found = measure_fisher(model, [batch], groups, 3, DeviceContext())
    naive = _naive_fisher(model, batch, groups)
    assert found.keys() == naive.keys()
    for name, matrix in found.items():
        torch.testing.assert_close(matrix, naive[name], rtol=1e-3, atol=1e-6 * float(naive[name].max()))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_measure_fisher_does_not_depend_on_the_batches():
    model, batch = make_opt(), _make_batch(True)
    groups = find_groups(model, "value_channels")
    whole = measure_fisher(model, [batch], groups, 3, DeviceContext())
    parts = measure_fisher(
        model, [{k: v[i : i + 1] for k, v in batch.items()} for i in range(3)], groups, 3, DeviceContext()
    )
    for name, matrix in whole.items():
        torch.testing.assert_close(matrix, parts[name], rtol=1e-3, atol=1e-6 * float(matrix.max()))


def test_measure_fisher_uses_no_more_sequences_than_asked():
    model, batch = make_opt(), _make_batch(False)
    groups = find_groups(model, "none")
    first = measure_fisher(model, [{name: part[:2] for name, part in batch.items()}], groups, 9, DeviceContext())
    again = measure_fisher(model, [batch, batch], groups, 2, DeviceContext())
    for name, matrix in first.items():
        torch.testing.assert_close(matrix, again[name])


def test_measure_fisher_predicts_the_divergence_of_a_small_error():
    """KL(p || p with an error e in one module's output) is e^T F e / 2, on average over random errors."""
    model = make_opt(init_std=0.1)
    ids = torch.randint(4, 2048, (24, 32), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    groups = find_groups(model, "value_channels")
    fisher = measure_fisher(model, [batch], groups, len(ids), DeviceContext())
    with torch.no_grad():
        clean = torch.log_softmax(model(ids).logits.double(), -1)
        for group in groups:
            linear = find_linear(model.get_submodule(group.layer_name), group.consumer)
            handle = linear.register_forward_hook(_AddNoise(1e-2))
            noisy = torch.log_softmax(model(ids).logits.double(), -1)
            handle.remove()
            divergence = (clean.exp() * (clean - noisy)).sum(-1).mean().item()
            assert divergence == pytest.approx(1e-4 * fisher[group.name].trace().item() / 2, rel=0.25), group.name


class _AddNoise:
    def __init__(self, size):
        self.size, self.generator = size, torch.Generator().manual_seed(4)

    def __call__(self, _module, _args, output):
        return output + self.size * torch.randn(output.shape, generator=self.generator)


def test_find_root_squares_to_the_matrix():
    matrix = torch.randn(5, 3, dtype=torch.float64)
    matrix = matrix @ matrix.T  # of rank 3
    for whole in (matrix, matrix + torch.eye(5, dtype=torch.float64)):
        root = sqrt_psd(whole)
        torch.testing.assert_close(root.T @ root, whole)
    assert root.tril(-1).abs().max() == 0, "a Cholesky factor, where there is one"


def test_labels_are_drawn_as_often_as_they_are_likely():
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    draws = torch.rand(20000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = draw_labels(probs.expand(20000, -1), draws).flatten()
    shares = torch.bincount(labels, minlength=6) / 20000
    torch.testing.assert_close(shares, probs, rtol=0, atol=0.012)
    assert shares[probs == 0].sum() == 0
    assert torch.equal(draw_labels(probs[None], torch.tensor([0.0], dtype=torch.float64)), torch.tensor([[1]]))
