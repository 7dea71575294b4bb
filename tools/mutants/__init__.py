"""Mutants: faults that the test suite must notice, and the campaign that shows that it does.

A mutant is one small change of the product that breaks a promise to a user: a comparison that is wrong, a check that is
missing, a step that is swapped. ``rooms/*.toml`` lists them, one file per room of the product, and names for each the
cheapest tests that fail with it. A change of the suite must leave all of them killed::

    make mutants                                        all of them
    python -m tools.mutants --only kv-share-two         some of them
    python -m tools.mutants --jobs 4 --json             in four copies of the tree, with a JSON line on stdout

* ``catalogue.py`` reads the list and applies a mutant to a source.
* ``worker.py`` has one copy of the tree, and runs tests in it with a mutant and without.
* ``__main__.py`` is the campaign: it checks that the named tests pass without a mutant, and reports what each one does.
"""
