"""Does the conformance suite notice real bugs?

A mutant is one of the twins with one small change that brings a bug back which this field really
had, or one of its cousins. The suite is shown each, and has to find it broken; what it lets pass is
either no bug at all, with the reason, or a hole in the suite.
"""
