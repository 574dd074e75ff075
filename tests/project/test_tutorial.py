"""docs/tutorial.md and docs/howto.md: every command and snippet runs, in the order of the page, on tiny models."""

import json
import re
import runpy
import shlex

import pytest
from helpers.families import make_model
from helpers.models import ROOT, save_model
from lm_eval.__main__ import cli_evaluate

from struprune_plugin.cli import main as cli

LLAMA = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
LLAMA |= {"max_position_embeddings": 512}
MIXTURE = {"mlp_only_layers": [], "decoder_sparse_step": 1, "moe_intermediate_size": 32, "max_position_embeddings": 512}
CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def run_command(line, monkeypatch):
    words = shlex.split(line, comments=True)
    if words[:1] == ["lm_eval"]:
        monkeypatch.setattr("sys.argv", words)
        cli_evaluate()
    elif words and words[:2] != ["hf", "download"]:  # the one line that needs a network
        assert words[0] == "struprune", line
        assert cli.main([*words[1:], "--quiet"]) == 0, line


@pytest.mark.parametrize("page", ["tutorial", "howto"])
def test_every_block_of_the_page_runs(page, tmp_path, monkeypatch):
    save_model(make_model("llama", **LLAMA), tmp_path / "smollm2")
    save_model(make_model("qwen3_moe", **MIXTURE), tmp_path / "mixture")
    file = tmp_path / "smollm2" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": CHAT}))
    (tmp_path / "train.jsonl").write_text('{"text": "The sea was calm that day."}\n' * 8)
    for name in ("eval", "struprune_plugin"):  # tasks and their texts, named from the repository's root
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(bash|python)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language == "python":
            (tmp_path / "snippet.py").write_text(block)
            runpy.run_path(str(tmp_path / "snippet.py"))
            continue
        for line in block.replace("\\\n", " ").splitlines():
            run_command(line, monkeypatch)
