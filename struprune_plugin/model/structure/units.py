"""Units of a decoder layer, read by the registered kinds from the measured couplings of its linears."""

from struprune_plugin.model.structure.couplings import Measured
from struprune_plugin.model.structure.layout import LayerLayout, UnitLayout
from struprune_plugin.model.unit_kind import list_kinds

_MOST = 0.6  # fraction of the columns


def read_units(measured: Measured) -> LayerLayout:
    """Return the units of a layer, without the joins of its modules with the residual stream."""
    units, left, kinds = list[UnitLayout](), dict[str, str](), list_kinds()
    for consumer in dict.fromkeys(second for _, second in measured.couplings):
        couplings = {first: each for (first, second), each in measured.couplings.items() if second == consumer}
        shares = {name: each.reached.float().mean(1) for name, each in couplings.items()}
        # with a row that reaches only a part of the columns; other linears reach them by the residual stream
        thin = {name: couplings[name] for name, share in shares.items() if share[share > 0].min() < _MOST}
        unit = next(filter(None, (kind.read(measured, thin, consumer) for kind in kinds)), None)
        if unit:
            units.append(unit)
        elif thin:  # else it reads the residual stream, which keeps its width
            name, coupling = max(thin.items(), key=lambda item: float(item[1].reached.float().mean()))
            together, columns = int(coupling.reached.sum(1).max()), coupling.reached.shape[1]
            left[consumer] = f"a row of {name} reaches {together} of {columns} columns"
    for kind in kinds:
        surplus = kind.list_surplus(units)
        units = [unit for unit in units if unit.output not in surplus]
        left |= surplus
    order = {kind.kind: kind.order for kind in kinds}
    return LayerLayout(sorted(units, key=lambda unit: order[unit.kind]), left)
