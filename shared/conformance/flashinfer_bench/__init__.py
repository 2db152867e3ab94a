"""FlashInfer-Bench: its definitions, workloads, solutions and traces, in JSON.

A solution in that format is judged by the laws (`pagetwin check --solution FILE`), and the
definitions are exported with the reference and with workloads that contain needles, poison and
ragged lengths (`pagetwin export FOLDER`).
"""
