"""docs/tutorial.md: every command and snippet runs, on a random model of SmolLM2's shape made small."""

import re
import runpy
import shlex

from helpers.families import make_model
from helpers.models import ROOT, save_model

from struprune_plugin.cli import main as cli

PAGE = ROOT / "docs" / "tutorial.md"
SHAPE = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 192}


def read_blocks(language):
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_every_command_of_the_tutorial_runs(tmp_path, monkeypatch, capsys):
    save_model(make_model("llama", **SHAPE, max_position_embeddings=512), tmp_path / "smollm2")
    monkeypatch.chdir(tmp_path)
    lines = "\n".join(read_blocks("bash")).replace("\\\n", " ").splitlines()
    for line in lines:
        words = shlex.split(line, comments=True)
        if not words or words[:2] == ["hf", "download"]:  # the one line that needs a network
            continue
        assert words[0] == "struprune", line
        assert cli.main([*words[1:], "--quiet"]) == 0, f"{line}\n{capsys.readouterr().err}"
    for snippet in read_blocks("python"):
        (tmp_path / "snippet.py").write_text(snippet)
        runpy.run_path(str(tmp_path / "snippet.py"))
