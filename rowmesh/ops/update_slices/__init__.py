"""Update slices: those of a tensor-train core that any rank read, given the gradient of the whole core.

On a GPU; on a CPU this is `rowmesh.ops.tensor_train.update_kernel`. Where one rank trains alone, the update follows the
gradients in the same pass (`rowmesh.ops.tensor_train`).
"""
