"""Verification and append on Hopper chips: packed query heads, split over the keys."""
