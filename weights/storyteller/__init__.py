"""The embedded default model, storyteller: a small GPT-2 that tells children's stories, and the recipe that made it.

The files beside this one are a Hugging Face folder (config, tokenizer, safetensors) that the server opens like any
other. Nothing here is imported by the server or the engine; `train.py` and `evaluate.py` are run by hand.
"""
