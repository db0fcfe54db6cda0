"""The embedded default model, storyteller: a small GPT-2 that tells children's stories.

The files beside this one are a Hugging Face folder (config, tokenizer, safetensors) that the server opens like any
other. `recipe/` made them; it is run by hand, and neither the server nor the engine imports it.
"""
