"""Training drafters: the target's answers (`regenerate`), blocks laid over them, the loss, the trainer, and means of drafters.

`run.train_drafter` puts them together; `hf-dspark regenerate` and `hf-dspark train` are its command line.
"""
