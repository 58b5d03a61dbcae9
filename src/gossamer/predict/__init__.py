"""Predictions of step times and of quality, and advice on which method to use. Needs neither torch nor a process group.

`methods` names what is compared, `cluster` and `presets` describe where, `compute` says how long a step's computation
takes, `costs` what an exchange costs. `closed_form`, `simulator` and `asynchronous` are the model; `predict` is one
call for every method, `advise` recommends one. `quality` predicts whether gossip trains as good a model.
"""
