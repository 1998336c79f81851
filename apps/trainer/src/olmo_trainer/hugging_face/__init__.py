"""Checkpoints of Hugging Face's `transformers`: read into a run, and written from one.

`architecture.py`: a model's configuration, and that of `transformers`. `configuration_files.py`: a
`config.json` to the configuration of a run. `weights.py`: the names and shapes of the tensors on
both sides. `tensor_files.py`: safetensors files. `tokenizer_files.py`: the run's tokenizer.
`import_run.py` and `export_run.py`: the two commands. `modeling_olmo_trainer.py`: the report's
family for `transformers`; it is copied into an export, never imported here.
"""
