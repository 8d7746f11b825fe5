"""What slows training down on this machine, and what to do about it: `rowmesh doctor`.

`facts` reads what the system says, `step` times a small training step in processes of their own, `advice` judges both,
and `text` prints the judgement.
"""
