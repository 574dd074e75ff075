"""Engines in a process of their own: a script that another Python runs, with JSON in and out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class EngineProcess:
    """Script that runs an engine where it is installed.

    :param engine: name of the engine, for messages
    :param library: what the script's Python must have
    :param script: reads a job as JSON from standard input and prints its answer as the last line: ``failed`` where it says why not
    """

    engine: str
    library: str
    script: Path

    def ask(self, job: Mapping[str, Any], python: str) -> Any:
        """Return the script's answer to a job.

        :param python: interpreter to run it; this one if empty
        :raises ValueError: the interpreter or the library is missing, or the engine refuses the job
        """
        command = [python or sys.executable, "-P", str(self.script)]  # -P: the modules beside it are none of its own
        try:
            done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True)
        except OSError as error:
            raise ValueError(
                f"--python: must be a Python with {self.library}, got {error}. Correct the path."
            ) from None
        answer = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else {}
        if done.returncode:
            answer["failed"] = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no word")
        if "failed" in answer:
            raise ValueError(
                f"{self.engine}: {command[0]} must have {self.library} and run the models, got {answer['failed']:.300}. Install it "
                "there, or name another with struprune costs --python, whose file a budget takes as its engine."
            )
        return answer
