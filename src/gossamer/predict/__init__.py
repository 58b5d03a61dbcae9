"""When, how and by how much decentralized training pays on a cluster. Pure: no torch, no process group.

`methods` (what is compared), `cluster` and `presets` (where), `compute` (how long a step's computation takes),
`closed_form`, `simulator` and `asynchronous` (the model), `predict` (one call for all), `advise` (which to take).
"""
