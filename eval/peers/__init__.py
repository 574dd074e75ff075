"""Other structured pruning methods, reimplemented from their papers, for a comparison on the same workload.

All of them take OPT and LLaMA, under grouped-query attention too. FASP, OSSCAR and FLAP load a model in its own dtype, as
``oneshot`` does, so that their seconds compare; the others stay in float32.
"""

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class PeerResult:
    """A model that another method made, ready to score.

    :param model: ready to score, in the dtype that it was pruned in
    :param removed: fraction of the parameters of the decoder layers' linears that is gone; what a method adds is counted
        against it, and what it only sets to zero is not there in a deployment and so counts as gone
    :param seconds: of the method alone, loading and scoring left out
    :param note: what a reader must know to compare
    :param tokenizer: of a smaller vocabulary; None where it is whole
    :param removed_rows: fraction of all parameters of the model that is gone with rows of the vocabulary
    """

    model: PreTrainedModel
    removed: float
    seconds: float
    note: str = ""
    tokenizer: PreTrainedTokenizerBase | None = None
    removed_rows: float = 0.0
