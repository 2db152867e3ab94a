"""Where does the speed of a paged attention kernel come from?

Each rung is a complete kernel that changes one thing of the rung below. All are held to the same
budgets and timed on the same batches, those that gained nothing too. `rungs.py` lists them,
`run.py` judges and times them on a GPU, and the pages under docs/ladder tell what came out.
"""
