"""End of a pruning stage: the model gets the class and the configuration of its new sizes."""

from __future__ import annotations

from transformers import PreTrainedModel

from struprune_plugin.export.convert import adopt_config, adopt_stock
from struprune_plugin.export.stock_config import make_uniform_config


def finish_model(model: PreTrainedModel, uniform: bool) -> None:
    """Give a sliced model its pruned class or, if all its layers have one size, its stock class again.

    :raises ValueError: as :func:`~struprune_plugin.export.convert.adopt_config`
    """
    if uniform:
        adopt_stock(model, make_uniform_config(model))
    else:
        adopt_config(model)
