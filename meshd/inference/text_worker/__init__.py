"""The text worker: a child process with tokenizer and chat template, and nothing else."""
