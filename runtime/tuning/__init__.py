"""The tuner: finds for each kernel of a layer the fastest point of its space on this card, and remembers it.

``search.py`` decides what is tried, ``compilers.py`` compiles it in processes beside, ``bench.py`` runs one kernel
alone on a layer's own tensors, ``tables.py`` keeps what was found, ``tuner.py`` puts these together for a call of a
layer. What users hold is in ``autotune.py``, and ``report.py`` says what came of it.
"""
