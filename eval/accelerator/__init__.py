"""Checks that need a real accelerator: device moves, memory budgets, counters and speed, in minutes.

    python -m eval.accelerator --output results/accelerator

needs one card of 80 GB or more (a CPU runs a reduced form), no network and no weights. Steps run in the order of their worth.
Finished steps are kept in ``accelerator.json``, summarised in ``accelerator.md``, and not repeated when the command is started
again. The command ends before ``--deadline`` seconds. A step that fails, hangs or kills its process is recorded, the others
continue, and the exit status is 1.
"""
