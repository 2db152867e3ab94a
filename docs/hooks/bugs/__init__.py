"""Pages about real bugs: figures from the state of both codes, and what the suite prints.

A page is a file of `docs/bugs/`. Its figure is the function of that name in the file of its kind
here. `page.py` puts the parts of a page together.
"""
