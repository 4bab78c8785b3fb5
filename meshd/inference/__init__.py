"""What a node computes: its range of layers, behind one interface (`engine`), and text to ids and back.

A real model runs in a process of its own (`worker`, the only code that sees torch), which `worker_engine` starts and speaks to
and `keeper` replaces when it dies; the rehearsal model (`hash_engine`) computes in the daemon and knows every right answer.
`batch` decides what is computed together, `text_worker` holds tokenizer and chat template. Nothing here knows other nodes.
"""
