"""Whether cuBLAS multiplies right with the multiprocessors that this process has.

Under MPS a process may have a part of a card, and there are parts with which cuBLAS gives wrong products, each time and without
an error: on an H200 with CUDA 13.0 many numbers at 40, 60, 70 and 80 % and none at 30, 50, 90 and 100 %. So a model's
sizes are tried before it is loaded. The numbers are -1, 0 and 1, whose sums are exact, so equality can be asked for;
products in float64 take other kernels.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

_ROWS = (128, 256, 512, 1024, 2048)  # fewer rows are multiplied by Triton, or were never wrong
_COMPARED = 512  # outputs of each row


def wrong_product(sizes: Iterable[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> tuple[int, int, int] | None:
    """Rows, outputs and inputs of a linear that comes out wrong; None if all are right. `sizes`: outputs and inputs."""
    for num_out, num_in in sizes:
        weight = _drawn(num_out, num_in, dtype, device)
        compared = torch.linspace(0, num_out - 1, min(_COMPARED, num_out), device=device).long()
        exact = weight[compared].double().T
        for num_rows in _ROWS:
            x = _drawn(num_rows, num_in, dtype, device)
            if not torch.equal(F.linear(x, weight)[:, compared], (x.double() @ exact).to(dtype)):
                return num_rows, num_out, num_in
    return None


def _drawn(num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randint(-1, 2, (num_rows, num_columns), dtype=torch.int8, device=device).to(dtype)
