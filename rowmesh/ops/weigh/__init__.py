"""Weigh: the gradients of the weights of ids: the product of an id's row and the gradient of its bag's vector.

    output[bag] = Σ weight[i] · row[i] / n        n is 1, or the number of ids in the bag where that is a mean
    gradient of weight[i] = gradient of output[bag] · row[i] / n

Rows are those that were pooled: as a step may change them before the backward, they are copied, each distinct one once.
Neither they nor gradients are expanded to one copy an id.
"""

from rowmesh.ops.weigh.cpu import kernels

__all__ = ["kernels"]
