"""Doctor: finds what slows training down on this machine, and says what to do: `rowmesh doctor`.

`facts` reads what the system says, `step` times a small training step in processes of their own, `advice` judges both,
and `text` prints the judgement.
"""
