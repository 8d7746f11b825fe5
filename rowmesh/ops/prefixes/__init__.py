"""Prefixes of tensor-train ids on GPUs: which ids share the product of two slices.

On a CPU this is `rowmesh.ops.tensor_train.arrange`.

Source: EL-Rec (SC'22) §III-A, Algorithm 1. Differs: prefixes are sorted, as `rowmesh.ops.tensor_train` says.
"""
