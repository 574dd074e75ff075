"""Guests: the kinds of units, one file each, registered as a third party's are; only ``registration.py`` imports this package.

They read a layer in this order: what an FFN or a recurrent mixer explains is not taken for the values of attention.
"""

from struprune_plugin.units import ffn, recurrent, attention, convolution, expert_channels  # noqa: F401, I001
