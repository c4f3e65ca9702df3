"""Generated questions with known answers: arithmetic, recall over long contexts, and facts of an invented world.

An item is a pure function of its suite, a seed and an index. Items that a model is trained on and items that it is
graded by are told apart by a hash of what they ask (``base.split_of``), so they cannot overlap.
"""
