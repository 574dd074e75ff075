import pytest
from helpers.models import CHEAP, run_oneshot

from struprune_plugin import LoRARecoveryModifier, StruPruneModifier, read_manifest
from struprune_plugin.reporting.tables import Table, summarize_layers, summarize_output
from struprune_plugin.storage.files import format_bytes, measure_weight_bytes


def test_summary_tells_sizes_budget_stages_and_recovery(opt, tmp_path):
    recipe = [
        StruPruneModifier(sparsity=0.3, **CHEAP),
        LoRARecoveryModifier(adapters={"rank": 2}, schedule={"epochs": 1}),
    ]
    run_oneshot(str(opt), recipe=recipe, output_dir=str(tmp_path / "out"))
    manifest = read_manifest(tmp_path / "out")
    summary = "\n\n".join(summarize_output(tmp_path / "out"))
    assert len(summary.splitlines()) <= 25
    sizes = manifest.model
    assert f"{sizes.parameters_before:,} → {sizes.parameters_after:,}" in summary
    assert sizes.removed_share == 1 - sizes.parameters_after / sizes.parameters_before
    assert f"(-{sizes.removed_share:.1%} of the whole model)" in summary
    assert "asked 30.000%" in summary
    assert "statistics 0." in summary
    assert f"struprune inspect {tmp_path / 'out'}" in summary
    assert "recovery" in summary
    assert "LoRA rank 2" in summary
    lines = str(summarize_layers(manifest)).splitlines()
    assert len(lines) == 2 + len(manifest.groups)
    first = manifest.groups[0]
    assert first.name in lines[2]
    assert f"{first.kept // 4} / 6" in lines[2]


def test_a_table_aligns_columns():
    assert str(Table(["name", "n"], [["a", 5], ["bcdef", 1234]])).splitlines() == [
        "name      n",
        "─────  ────",
        "a         5",
        "bcdef  1234",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (4_460_000, "4.46 MB"), (999_700, "1 MB"), (2e12, "2 TB"), (3e15, "3000 TB")],
)
def test_format_bytes_gives_three_digits(count, text):
    assert format_bytes(count) == text


def test_weights_in_two_forms_count_once(tmp_path):
    sizes = {"model-1.safetensors": 10, "model-2.safetensors": 5, "consolidated.safetensors": 15}
    sizes |= {"pytorch_model.bin": 15, "training_args.bin": 1, "config.json": 7}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    assert measure_weight_bytes(tmp_path) == 15
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    assert measure_weight_bytes(tmp_path) == 15
    assert measure_weight_bytes(tmp_path / "nowhere") == 0
