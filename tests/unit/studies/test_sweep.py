"""``struprune sweep``: its points end with what single runs write, and none is run twice."""

import json

import pytest
from helpers.models import run_oneshot

from struprune_plugin.cli import main as cli
from struprune_plugin.cli.sweep_command import read_budgets, read_pick, read_sparsities
from struprune_plugin.evaluation.text import DEMO_CALIBRATION
from struprune_plugin.recipes.shipped import find_recipe
from struprune_plugin.storage.files import digest_whole_file
from struprune_plugin.studies.sweep import SweepRun
from struprune_plugin.studies.sweep_results import find_pareto, pick_point

SMALL = ["--num-samples", "8", "--seq-length", "32"]
SCORED = ["--window", "32", "--max-tokens", "512"]


def run(model, folder, *more, sparsities="0.2,0.4"):
    return cli.main(
        ["sweep", str(model), "--output", str(folder), "--sparsity", sparsities, *SMALL, *SCORED, "--quiet", *more]
    )


def test_a_sweep_ends_with_what_single_runs_write(opt, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "sweep"
    assert run(opt, folder, "--methods", "default,uniform", "--pick", "+900% perplexity", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert set(record["points"]) == {"default 0.2", "default 0.4", "uniform 0.2", "uniform 0.4"}
    sizes = {name: point["parameters"] for name, point in record["points"].items()}
    picked = record["picked"]
    assert sizes[picked["point"]] == min(sizes.values())
    assert {"sweep.json", "sweep.md", "perplexity.svg", "speed.svg", "picked"} <= {p.name for p in folder.iterdir()}
    single = tmp_path / "single"
    method, _, sparsity = picked["point"].partition(" ")
    argv = ["prune", str(opt), "--recipe", "struprune", "--sparsity", sparsity, "--output", str(single), *SMALL]
    assert cli.main([*argv, "--set", f"allocation={'error_curve' if method == 'default' else method}", "--quiet"]) == 0
    weights = [digest_whole_file(path / "model.safetensors") for path in (folder / "picked", single)]
    assert weights[0] == weights[1]
    capsys.readouterr()

    def fail(*_args, **_kwargs):
        raise AssertionError("a finished point is run again")

    monkeypatch.setattr(SweepRun, "prune", fail)
    assert run(opt, folder, "--methods", "default,uniform") == 0
    assert "no other point is smaller and better" in capsys.readouterr().out


def test_a_sweep_over_budgets(opt, tmp_path, capsys):
    budgets = ["--budget", "{bytes: 240kB}", "--budget", "{parameters: 0.2}", "--budget", "{bytes: 10kB}"]
    assert run(opt, tmp_path / "sweep", *budgets, "--json") == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert set(points) == {"default bytes: 240kB", "default parameters: 0.2", "default bytes: 10kB"}
    assert points["default bytes: 240kB"]["budget"] == {"bytes": "240kB"}
    assert points["default parameters: 0.2"]["removed"] == pytest.approx(0.2, abs=0.01)
    assert "budget: bytes must be at least" in points["default bytes: 10kB"]["refused"]


def test_budgets_of_a_sweep_are_yaml():
    assert read_budgets(["{bytes: 9}"]) == {"bytes: 9": {"bytes": 9}}
    with pytest.raises(ValueError, match="--budget must be valid YAML"):
        read_budgets(["{bytes: "])
    with pytest.raises(ValueError, match="--budget: each budget must be given once"):
        read_budgets(["{bytes: 9}", "{bytes: 9}"])


def test_a_sweep_that_was_killed_goes_on(opt, tmp_path, monkeypatch):
    prune = SweepRun.prune

    def die(self, recipe, out):
        if recipe.modifiers[0].sparsity == 0.4:
            raise KeyboardInterrupt
        return prune(self, recipe, out)

    monkeypatch.setattr(SweepRun, "prune", die)
    assert run(opt, tmp_path / "sweep") == 130
    held = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert list(held["points"]) == ["default 0.2"]
    monkeypatch.setattr(SweepRun, "prune", prune)
    assert run(opt, tmp_path / "sweep", sparsities="0.2,0.4") == 0
    after = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert after["points"]["default 0.2"] == held["points"]["default 0.2"]


def test_a_folder_of_something_else_is_left_alone(opt, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert run(opt, tmp_path) == 2
    assert "must be empty, absent or the folder of an earlier sweep" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_another_sweep_is_not_mixed_in(opt, tmp_path, capsys):
    assert run(opt, tmp_path / "sweep", sparsities="0.2") == 0
    assert run(opt, tmp_path / "sweep", "--seed", "5", sparsities="0.2") == 2
    assert "holds a sweep with another seed" in capsys.readouterr().err


def test_another_recipe_under_the_same_name_is_another_sweep(opt, tmp_path, capsys):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(find_recipe("struprune").read_text())
    assert run(opt, tmp_path / "sweep", "--recipe", str(recipe), sparsities="0.2") == 0
    recipe.write_text(recipe.read_text() + "\n# changed\n")
    assert run(opt, tmp_path / "sweep", "--recipe", str(recipe), sparsities="0.2") == 2
    assert "holds a sweep with another recipe" in capsys.readouterr().err


def test_what_a_killed_sweep_left_and_what_was_refused_is_not_kept(opt, tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise ValueError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(SweepRun, "prune", refuse)
        assert run(opt, tmp_path / "sweep", sparsities="0.2") == 0
    (tmp_path / "sweep" / ".point-x").mkdir()
    assert run(opt, tmp_path / "sweep", sparsities="0.2") == 0
    assert "perplexity" in json.loads((tmp_path / "sweep" / "sweep.json").read_text())["points"]["default 0.2"]
    assert not list((tmp_path / "sweep").glob(".point-*"))


def test_a_refused_point_does_not_stop_the_rest(opt, tmp_path, capsys):
    assert run(opt, tmp_path / "sweep", sparsities="0.2,0.98") == 0
    printed = capsys.readouterr().out
    assert "default 0.98: refused, " in printed
    assert "default 0.2" in printed


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0.1:0.6:0.1", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
        ("0.5", [0.5]),
        ("0.2,0.4", [0.2, 0.4]),
        ("0.1:0.25:0.1", [0.1, 0.2]),
    ],
)
def test_read_sparsities_takes_ranges_and_lists(text, found):
    assert read_sparsities(text) == found


@pytest.mark.parametrize(
    "text", ["", "0", "1", "0.5,0.5", "0.1:0.6", "0.6:0.1:0.1", "0.1:0.2:0", "0.1:0.9:1e-9", "a:b:c", "-0.1"]
)
def test_read_sparsities_refuses_the_rest(text):
    with pytest.raises(ValueError, match="--sparsity: must be first:last:step"):
        read_sparsities(text)


def test_read_pick_takes_shares_and_points():
    assert read_pick("+5% perplexity", []) == (0.05, True, "perplexity")
    assert read_pick("-0.02 arc_easy", ["arc_easy"]) == (0.02, False, "arc_easy")
    for text in ("5% perplexity", "-5% perplexity", "+5% arc_easy", "perplexity"):
        with pytest.raises(ValueError, match="--pick: must be like"):
            read_pick(text, ["arc_easy"])


def test_picks_and_pareto_points_are_those_of_the_naive_search():
    def point(parameters, perplexity, accuracy):
        return {"parameters": parameters, "perplexity": perplexity, "tasks": {"t": {"value": accuracy}}}

    points = {"a": point(9, 10.1, 0.8), "b": point(7, 10.4, 0.79), "c": point(7, 11.0, 0.7), "d": point(5, 12.0, 0.6)}
    record = {"dense": point(10, 10.0, 0.8), "points": {**points, "e": {"refused": "no"}}}
    assert find_pareto(record) == ["a", "b", "d"]
    assert pick_point(record, (0.05, True, "perplexity")) == "b"
    assert pick_point(record, (2.0, False, "perplexity")) == "d"
    assert pick_point(record, (0.1, False, "t")) in ("b", "c")
    with pytest.raises(ValueError, match=r"none of the \d+ points keeps perplexity within"):
        pick_point(record, (0.001, True, "perplexity"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "nonsense"], "--methods: must be default, error_curve"),
        (["--pick", "best"], "--pick: must be like"),
        (["--pick", "-1% arc_easy"], "--pick: must name what the sweep measures"),
        (["--picked", "out"], "--picked: has no effect without --pick"),
        (["--text", "nowhere.jsonl"], "must be an existing JSON-lines file"),
        (["--window", "1"], "must be a whole number from 2"),
    ],
)
def test_bad_input_is_refused_before_any_work(opt, tmp_path, capsys, words, message):
    assert run(opt, tmp_path / "sweep", *words) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_picked_model_replaces_no_other_output(opt, tmp_path, capsys):
    run_oneshot(str(opt), sparsity=0.1, output_dir=str(tmp_path / "mine"))
    before = (tmp_path / "mine" / "struprune.json").read_bytes()
    pick = ["--pick", "+90% perplexity", "--picked", str(tmp_path / "mine")]
    assert run(opt, tmp_path / "sweep", *pick, sparsities="0.2") == 2
    assert "--picked: must be empty or absent" in capsys.readouterr().err
    assert (tmp_path / "mine" / "struprune.json").read_bytes() == before


def test_the_column_of_the_calibration_text_is_not_asked_of_the_shipped_text(opt, tmp_path):
    lines = [json.loads(line)["text"] for line in DEMO_CALIBRATION.read_text().splitlines()]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({"content": line}) + "\n" for line in lines))
    words = ["--data", str(tmp_path / "own.jsonl"), "--text-column", "content"]
    assert run(opt, tmp_path / "sweep", *words, sparsities="0.2") == 0


def test_a_window_beyond_the_positions_is_refused(opt, tmp_path, capsys):
    assert run(opt, tmp_path / "sweep", "--window", "512", sparsities="0.2") == 2
    assert "--window: must be at most the model's 64 positions, got 512" in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()
