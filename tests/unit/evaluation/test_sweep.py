"""``struprune sweep``: several sizes by one command, each a plain run."""

import json

import pytest

from struprune_plugin.cli import main as cli
from struprune_plugin.cli.options import read_pick, read_sparsities
from struprune_plugin.evaluation import sweep as sweeping
from struprune_plugin.evaluation.sweep import digest_files, pick_point
from struprune_plugin.evaluation.text import DEMO_TEST
from struprune_plugin.recipes.shipped import find_recipe

SMALL = ["--num-samples", "8", "--seq-length", "32"]
SCORED = ["--window", "32", "--max-tokens", "512"]


def run(model, folder, *more, sparsities="0.2,0.4"):
    return cli.main(
        ["sweep", str(model), "--output", str(folder), "--sparsity", sparsities, *SMALL, *SCORED, "--quiet", *more]
    )


def test_a_sweep_leaves_what_single_runs_write_and_goes_on(opt, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "sweep"
    assert run(opt, folder, "--pick", "+900% perplexity", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    scores, picked = record["scores"], record["picked"]
    assert [*scores] == ["dense", "0.2", "0.4"]
    sizes = {name: point["parameters"] for name, point in scores.items()}
    assert sizes[picked["point"]] == min(sizes.values())
    assert {"sweep.json", "sweep.svg", "0.2", "0.4"} <= {p.name for p in folder.iterdir()}
    single = tmp_path / "single"
    argv = ["prune", str(opt), "--recipe", "struprune", "--sparsity", "0.4", "--output", str(single), *SMALL]
    assert cli.main([*argv, "--quiet"]) == 0
    first, second = ((path / "model.safetensors").read_bytes() for path in (folder / "0.4", single))
    assert first == second
    capsys.readouterr()

    def fail(*_args, **_kwargs):
        raise AssertionError("a finished point is run again")

    monkeypatch.setattr("struprune_plugin.entrypoint.oneshot", fail)
    assert run(opt, folder) == 0
    header, _, *lines = capsys.readouterr().out.splitlines()[:5]
    assert header.split("  ")[:2] == ["of the decoder's linears", "of the whole model"]
    shares = [f"{1 - sizes[name] / sizes['dense']:.1%}" for name in sizes]
    assert [line.split()[:2] for line in lines] == [[name, share] for name, share in zip(sizes, shares, strict=True)]


def test_a_sweep_that_was_killed_goes_on(tmp_path):
    scores, done = {"parameters": 5, "perplexity": 2.0}, []

    def prune(sparsity, out):
        if sparsity == 0.4 and len(done) == 1:
            done.append("killed")
            raise KeyboardInterrupt
        done.append(out.name)
        out.mkdir()

    with pytest.raises(KeyboardInterrupt):
        sweeping.run_points(tmp_path / "s", {"model": "m"}, [0.2, 0.4], prune, lambda _: dict(scores))
    found, _ = sweeping.run_points(tmp_path / "s", {"model": "m"}, [0.2, 0.4], prune, lambda _: dict(scores))
    assert done == ["0.2", "killed", "0.4"]
    assert [*found] == ["dense", "0.2", "0.4"]
    (tmp_path / "s" / "0.2").rmdir()
    sweeping.run_points(tmp_path / "s", {"model": "m"}, [0.2, 0.4], prune, lambda _: dict(scores))
    assert done == ["0.2", "killed", "0.4", "0.2"], "a point whose model is gone is no model to pick"


def test_a_point_without_a_score_is_left_to_its_own_sweep(tmp_path):
    def interrupt(_):
        raise KeyboardInterrupt

    points = [0.2], lambda _, out: out.mkdir(exist_ok=True)
    with pytest.raises(KeyboardInterrupt):
        sweeping.run_points(tmp_path / "s", {"model": "m"}, *points, interrupt)
    with pytest.raises(ValueError, match="holds a sweep with another model, which cannot be continued"):
        sweeping.run_points(tmp_path / "s", {"model": "n"}, *points, lambda _: {"parameters": 5, "perplexity": 2.0})
    assert (tmp_path / "s" / "0.2").is_dir()


def test_a_folder_of_something_else_is_left_alone(opt, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert run(opt, tmp_path) == 2
    assert "must be empty, absent or the folder of an earlier sweep" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    for content in ("{", '{"settings": 1, "scores": {}}'):
        (tmp_path / "sweep").mkdir(exist_ok=True)
        (tmp_path / "sweep" / "sweep.json").write_text(content)
        assert run(opt, tmp_path / "sweep") == 2
        assert "sweep.json must be a sweep's record, it is damaged" in capsys.readouterr().err


def test_a_refused_point_is_left_out_of_a_sweep_unless_it_is_the_first(opt, tmp_path, capsys, monkeypatch):
    def refuse(*_):
        raise ValueError("--pick: none of the points")

    monkeypatch.setattr(sweeping, "pick_point", refuse)
    assert run(opt, tmp_path / "none", sparsities="0.98") == 2
    assert "Lower sparsity" in capsys.readouterr().err
    assert run(opt, tmp_path / "sweep", "--pick", "+1% perplexity", sparsities="0.2,0.98") == 2
    assert [*json.loads((tmp_path / "sweep" / "sweep.json").read_text())["scores"]] == ["0.2", "dense"]
    told = capsys.readouterr()
    assert "\n0.2 " in told.out
    assert "--sparsity: left out: 0.98: sparsity=0.98: the chosen units must hold" in told.err
    assert "--pick: none of the points" in told.err, "behind the table"


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


@pytest.mark.parametrize("text", ["", "0", "1", "0.1:0.6", "0.6:0.1:0.1", "0.1:0.2:0", "0.1:0.9:1e-9", "a:b:c", "-0.1"])
def test_read_sparsities_refuses_the_rest(text):
    with pytest.raises(ValueError, match="--sparsity: must be first:last:step"):
        read_sparsities(text)


def test_read_pick_takes_a_share():
    assert read_pick("+5% perplexity") == 0.05
    for text in ("5% perplexity", "-5% perplexity", "+5% arc_easy", "perplexity"):
        with pytest.raises(ValueError, match="--pick: must be like"):
            read_pick(text)


def test_picks_are_those_of_the_naive_search():
    points = {"dense": (10, 10.0), "a": (9, 10.1), "b": (7, 10.4), "c": (7, 11.0), "d": (5, 12.0)}
    scores = {name: {"parameters": size, "perplexity": value} for name, (size, value) in points.items()}
    assert pick_point(scores, 0.05) == "b"
    assert pick_point(scores, 0.2) == "d"
    with pytest.raises(ValueError, match=r"none of the points keeps perplexity within"):
        pick_point(scores, 0.001)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipe", "nonsense"], "neither an existing file nor the name of a shipped recipe"),
        (["--pick", "best"], "--pick: must be like"),
        (["--set", "StruPruneModifier.sparsity=0.1"], "--set: must leave sparsity to --sparsity"),
        (["--text", "nowhere.jsonl"], "file 'nowhere.jsonl' does not exist"),
        (["--window", "1"], "greater than or equal to 2"),
        (["--window", "512"], "--window: must be at most the model's 64 positions, got 512"),
        (
            ["--recipe", "a_stage:\n  a_modifiers: {StruPruneModifier: {}}", "--window", "512"],
            "--window: must be at most",
        ),
    ],
)
def test_bad_input_is_refused_before_any_work(opt, tmp_path, capsys, words, message):
    assert run(opt, tmp_path / "sweep", *words) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_another_sweep_and_another_recipe_under_the_same_name_are_not_mixed_in(opt, tmp_path, capsys):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(find_recipe("struprune").read_text())
    words = ["--recipe", str(recipe)]
    assert run(opt, tmp_path / "sweep", *words, sparsities="0.2") == 0
    assert run(opt, tmp_path / "sweep", *words, "--seed", "5", sparsities="0.2") == 2
    assert "holds a sweep with another run" in capsys.readouterr().err
    text = tmp_path / "text.jsonl"
    text.write_bytes(DEMO_TEST.read_bytes())
    assert run(opt, tmp_path / "other", "--text", str(text), sparsities="0.2") == 0
    text.write_bytes(DEMO_TEST.read_bytes() + b'{"text": "more"}\n')
    assert run(opt, tmp_path / "other", "--text", str(text), sparsities="0.3") == 2
    assert "holds a sweep with another content" in capsys.readouterr().err
    recipe.write_text(recipe.read_text() + "\n# changed\n")
    assert run(opt, tmp_path / "sweep", *words, sparsities="0.2") == 2
    assert "holds a sweep with another recipe" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["merges.txt", "chat_template.jinja", "modeling_own.py"])
def test_every_file_that_changes_a_run_is_in_the_digest_of_a_model(name, tmp_path):
    digests = set()
    for content in ("a", "b"):
        (tmp_path / name).write_text(content)
        digests.add(digest_files(str(tmp_path)))
    assert len(digests) == 2
