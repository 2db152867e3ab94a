"""Mask and score options: one file per option.

visible_range.py holds everything that the masks have in common: their arguments and constants, how
they are lowered, and the device functions that compose them. score.py does the same for score
options.
"""
