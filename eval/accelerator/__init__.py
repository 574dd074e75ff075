"""What only a real accelerator can prove: device moves, budgets, counters and speed, in minutes.

    python -m eval.accelerator --output results/accelerator

needs one card of 80 GB or more (a CPU runs a reduced form), no network and no weights. Steps run in the order of their worth,
each as a unit of its own: what is finished stands in ``accelerator.json``, is told in ``accelerator.md``, and is not done
again when the command is started again. It ends before ``--deadline`` seconds; a step that fails, hangs or kills its process
is written down, the others go on, and the exit status is 1.
"""
