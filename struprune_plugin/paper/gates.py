"""``l0``: a learned gate per unit."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from struprune_plugin.linalg.second_moments import SecondMoments
from struprune_plugin.pruning.importance.criterion import IMPORTANCES, Importance
from struprune_plugin.pruning.problem import GroupProblem

_CONCRETE_LOW, _CONCRETE_HIGH, _CONCRETE_TEMPERATURE = -0.1, 1.1, 2 / 3  # Louizos et al. 2018, section 4
_BUDGET_PENALTY = 10.0
_STEPS = 200


@IMPORTANCES.register
class L0Gates(Importance):
    """Log-odds of hard-concrete gates on the reconstruction error, see :func:`score_l0`."""

    takes_offload: ClassVar[bool] = False
    aims: ClassVar[bool] = True
    method: Literal["l0"] = "l0"

    def score(self, problem: GroupProblem, columns: Tensor) -> Tensor:
        return score_l0(problem.damped, problem.weight, columns, retention=1 - problem.sparsity)


def score_l0(damped: SecondMoments, weight: Tensor, unit_columns: Tensor, retention: float) -> Tensor:
    """Return the log-odds of hard-concrete gates, one per unit, learned on the reconstruction error, shape [units], float64.

    Minimises ``E_g ||Y - W diag(g) P||^2 / tr(Y Y^T) + 10 (E(share open) - retention)^2`` by Adam, with eight draws of the
    gates per step.
    Source: paper, table "Other structured methods" (Louizos et al. 2018, Eq. 10 to 12).

    :param weight: shape [d, n + 1], float64, bias last
    :param unit_columns: shape [units, columns_per_unit], int64
    """
    quadratic, linear = _gate_quadratic(damped, weight, unit_columns)
    energy = damped.target_energy.clamp(min=1e-300)
    generator = torch.Generator().manual_seed(0)  # on the host, so that every device draws the same
    log_odds = torch.full((len(unit_columns),), 2.0, dtype=torch.float64, device=weight.device, requires_grad=True)
    optimizer = torch.optim.Adam([log_odds], lr=0.1)
    shift = _CONCRETE_TEMPERATURE * torch.log(torch.tensor(-_CONCRETE_LOW / _CONCRETE_HIGH, dtype=torch.float64))
    for _ in range(_STEPS):
        with torch.enable_grad():
            noise = torch.rand(8, len(log_odds), generator=generator, dtype=torch.float64).to(weight.device)
            noise = noise.clamp(1e-6, 1 - 1e-6).logit()
            concrete = torch.sigmoid((noise + log_odds) / _CONCRETE_TEMPERATURE)
            gates = (concrete * (_CONCRETE_HIGH - _CONCRETE_LOW) + _CONCRETE_LOW).clamp(0, 1)
            gates = torch.cat([gates, torch.ones_like(gates[:, :1])], 1)  # the bias has no gate
            error = ((gates @ quadratic) * gates).sum(1) - 2 * gates @ linear + damped.target_energy
            open_share = torch.sigmoid(log_odds - shift).mean()
            loss = error.mean() / energy + _BUDGET_PENALTY * (open_share - retention).square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return log_odds.detach()


def _gate_quadratic(damped: SecondMoments, weight: Tensor, unit_columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return (M, v) with ``||Y - W diag(g) P||^2 = g^T M g - 2 v^T g + tr(Y Y^T)``, g over units and the bias."""
    num_units, size = len(unit_columns), damped.gram.shape[0]
    member = torch.zeros(size, num_units + 1, dtype=torch.float64, device=weight.device)
    member[unit_columns, torch.arange(num_units, device=weight.device)[:, None]] = 1
    member[-1, -1] = 1
    products = (weight.T @ weight) * damped.gram
    return member.T @ products @ member, member.T @ (weight * damped.cross).sum(0)
